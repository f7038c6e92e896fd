// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "plugin/comm/channel.h"

namespace trueshard::engine {

std::vector<std::string> exchange_texts(const std::shared_ptr<comm::Transport>& transport, const std::string& name,
                                        const std::string& text) {
  const uint64_t length = text.size();
  auto region = transport->allocate(name, sizeof length + text.size());
  comm::Channel channel(transport, name, {});
  std::byte* mine = region->data(transport->rank());
  std::memcpy(mine, &length, sizeof length);
  std::memcpy(mine + sizeof length, text.data(), text.size());
  const uint64_t seq = channel.post(comm::Fingerprint::of("agree"));
  channel.wait_all_posted(seq);
  std::vector<std::string> texts(transport->size());
  for (int rank = 0; rank < transport->size(); ++rank) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, region->data(rank), sizeof bytes);
    texts[rank].assign(reinterpret_cast<const char*>(region->data(rank)) + sizeof bytes, bytes);
  }
  channel.done_reading(seq);
  channel.wait_all_read(seq);
  return texts;
}

namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void require_agreement(const std::shared_ptr<comm::Transport>& transport, const std::string& name,
                       const Statement& statement, const std::string& where, const std::string& advice) {
  std::string text = statement.local_error;
  std::replace(text.begin(), text.end(), '\n', ' ');
  for (const auto& line : statement.lines) text += '\n' + line;
  const auto texts = exchange_texts(transport, name, text);
  std::vector<std::vector<std::string>> lines;
  for (const auto& each : texts) lines.push_back(split(each + "\n"));
  const std::string me = "trueshard[rank " + std::to_string(transport->rank()) + "/" +
                         std::to_string(transport->size()) + "] " + where + ": ";
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    if (!lines[rank].empty()) TORCH_CHECK(lines[rank][0].empty(), me, "rank ", rank, ": ", lines[rank][0]);
  }
  for (size_t rank = 1; rank < lines.size(); ++rank) {
    const size_t count = std::max(lines[0].size(), lines[rank].size());
    for (size_t i = 1; i < count; ++i) {
      const std::string zero = i < lines[0].size() ? lines[0][i] : "nothing more";
      const std::string other = i < lines[rank].size() ? lines[rank][i] : "nothing more";
      TORCH_CHECK(zero == other, me, "ranks differ: rank 0 has [", zero, "], rank ", rank, " has [", other, "]; ",
                  advice);
    }
  }
}

}  // namespace trueshard::engine
