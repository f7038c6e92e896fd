// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/identity.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <mutex>
#include <sstream>

#include <c10/util/Exception.h>

namespace trueshard::comm {
namespace {

std::string process_token() {
  static std::mutex mutex;
  static std::string token;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {  // first use, or a child after fork
    std::array<unsigned char, 16> bytes{};
    TORCH_CHECK(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
                "trueshard: getrandom failed, no process token could be made");
    static constexpr char kDigits[] = "0123456789abcdef";
    token.clear();
    for (const unsigned char byte : bytes) {
      token += kDigits[byte >> 4];
      token += kDigits[byte & 15];
    }
    owner = getpid();
  }
  return token;
}

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

int64_t process_start_time(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return -1;
  const size_t close = line.rfind(')');  // the name in parentheses may hold anything
  if (close == std::string::npos) return -1;
  std::istringstream rest(line.substr(close + 1));
  std::string state, field;
  rest >> state;
  if (state == "Z" || state == "X") return -1;
  for (int i = 4; i <= 22; ++i) rest >> field;  // field 22, counted from 1
  return rest ? std::atoll(field.c_str()) : -1;
}

Identity this_process() {
  Identity identity;
  identity.boot_id = read_line("/proc/sys/kernel/random/boot_id");
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  identity.hostname = name.data();
  identity.token = process_token();
  identity.pid = getpid();
  identity.start_time = process_start_time(identity.pid);
  struct stat status {};
  if (stat("/proc/self/ns/pid", &status) == 0) identity.pid_namespace = status.st_ino;
  TORCH_CHECK(!identity.boot_id.empty() && identity.start_time >= 0,
              "trueshard: /proc cannot be read; it is needed to tell whether ranks share a host, mount it");
  return identity;
}

std::string Identity::encode() const {
  std::ostringstream out;
  out << boot_id << '\n'
      << hostname << '\n'
      << token << '\n'
      << pid << '\n'
      << start_time << '\n'
      << pid_namespace << '\n'
      << probe.encode();
  return out.str();
}

Identity Identity::decode(const std::string& text) {
  std::istringstream in(text);
  Identity identity;
  std::string number, rest;
  std::getline(in, identity.boot_id);
  std::getline(in, identity.hostname);
  std::getline(in, identity.token);
  std::getline(in, number);
  identity.pid = std::atoll(number.c_str());
  std::getline(in, number);
  identity.start_time = std::atoll(number.c_str());
  std::getline(in, number);
  identity.pid_namespace = static_cast<uint64_t>(std::atoll(number.c_str()));
  TORCH_CHECK(static_cast<bool>(std::getline(in, rest)), "trueshard: a rank's identity in the store is malformed: '",
              text, "'; all ranks must run the same version of trueshard");
  identity.probe = SegmentTicket::decode(rest);
  return identity;
}

}  // namespace trueshard::comm
