// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/launch_environment.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <c10/util/Exception.h>

namespace trueshard::comm {
namespace {

constexpr std::array kNames{"RANK",
                            "WORLD_SIZE",
                            "MASTER_ADDR",
                            "MASTER_PORT",
                            "TORCHELASTIC_USE_AGENT_STORE",
                            "TORCHELASTIC_RESTART_COUNT",
                            "OMPI_COMM_WORLD_RANK",
                            "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_SIZE",
                            "OMPI_MCA_orte_hnp_uri",
                            "PMIX_NAMESPACE",
                            "SLURM_STEP_ID",
                            "SLURM_JOB_ID",
                            "SLURM_PROCID",
                            "SLURM_NTASKS",
                            "SLURM_NNODES",
                            "SLURM_RESTART_COUNT"};

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}
  bool has(const std::string& name) const { return !text(name).empty(); }
  std::string text(const std::string& name) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? std::string() : found->second;
  }
  std::string need(const std::string& name, const std::string& because) const {
    TORCH_CHECK(has(name), "trueshard: init_process_group: ", because, ", but ", name,
                " is not set; set it, or unset the others for a run on one rank");
    return text(name);
  }
  int number(const std::string& name, const std::string& because, int low, int high) const {
    const std::string value = need(name, because);
    char* end = nullptr;
    const long parsed = std::strtol(value.c_str(), &end, 10);
    TORCH_CHECK(*end == '\0' && parsed >= low && parsed <= high, "trueshard: init_process_group: ", name, " is '",
                value, "', expected a whole number from ", low, " to ", high);
    return static_cast<int>(parsed);
  }

 private:
  const Variables& variables_;
};

constexpr int kMostRanks = 1 << 20;

void read_master(const Reader& reader, Launch* launch, const std::string& because) {
  launch->store = Launch::Store::kTcp;
  launch->host = reader.need("MASTER_ADDR", because);
  launch->port = static_cast<uint16_t>(reader.number("MASTER_PORT", because, 1, 65535));
  launch->host_store = launch->rank == 0;
}

std::string fingerprint(const std::string& text) {  // FNV-1a, in hexadecimal
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  char out[24];
  std::snprintf(out, sizeof out, "%016llx", static_cast<unsigned long long>(hash));
  return out;
}

Launch from_torchrun(const Reader& reader) {
  const std::string because = reader.has("RANK") ? "RANK is set" : "WORLD_SIZE is set";
  Launch launch;
  launch.size = reader.number("WORLD_SIZE", because, 1, kMostRanks);
  launch.rank = reader.number("RANK", because, 0, launch.size - 1);
  launch.prefix = "trueshard";
  if (launch.size == 1 && !reader.has("MASTER_ADDR")) return launch;
  read_master(reader, &launch, because);
  if (reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    launch.host_store = false;  // the agent runs it, and keeps it through restarts
    launch.prefix +=
        "/attempt_" + (reader.has("TORCHELASTIC_RESTART_COUNT") ? reader.text("TORCHELASTIC_RESTART_COUNT") : "0");
  }
  return launch;
}

Launch from_open_mpi(const Reader& reader) {
  const std::string because = "the program was started by Open MPI (OMPI_COMM_WORLD_* is set)";
  Launch launch;
  launch.size = reader.number("OMPI_COMM_WORLD_SIZE", because, 1, kMostRanks);
  launch.rank = reader.number("OMPI_COMM_WORLD_RANK", because, 0, launch.size - 1);
  launch.prefix = "trueshard";
  if (launch.size == 1) return launch;
  if (reader.has("MASTER_ADDR")) {
    read_master(reader, &launch, because + " and MASTER_ADDR is set");
    return launch;
  }
  if (reader.has("OMPI_COMM_WORLD_LOCAL_SIZE") &&
      reader.text("OMPI_COMM_WORLD_LOCAL_SIZE") != std::to_string(launch.size)) {
    reader.need("MASTER_ADDR", because + " on several hosts");
  }
  const std::string name = reader.has("OMPI_MCA_orte_hnp_uri") ? "OMPI_MCA_orte_hnp_uri" : "PMIX_NAMESPACE";
  launch.store = Launch::Store::kFile;
  launch.job = "mpi-" + fingerprint(reader.need(name, because + " without MASTER_ADDR"));
  return launch;
}

Launch from_slurm(const Reader& reader) {
  const std::string because = "the program runs in a Slurm step (SLURM_STEP_ID is set)";
  Launch launch;
  launch.size = reader.number("SLURM_NTASKS", because, 1, kMostRanks);
  launch.rank = reader.number("SLURM_PROCID", because, 0, launch.size - 1);
  launch.prefix = "trueshard";
  if (launch.size == 1) return launch;
  if (reader.has("MASTER_ADDR")) {
    read_master(reader, &launch, because + " and MASTER_ADDR is set");
    return launch;
  }
  if (reader.has("SLURM_NNODES") && reader.text("SLURM_NNODES") != "1")
    reader.need("MASTER_ADDR", because + " on several nodes");
  launch.store = Launch::Store::kFile;
  launch.job = "slurm-" + reader.need("SLURM_JOB_ID", because + " without MASTER_ADDR") + "." +
               reader.text("SLURM_STEP_ID") + "." +
               (reader.has("SLURM_RESTART_COUNT") ? reader.text("SLURM_RESTART_COUNT") : "0");
  return launch;
}

}  // namespace

Launch parse_launch(const Variables& variables) {
  const Reader reader(variables);
  if (reader.has("RANK") || reader.has("WORLD_SIZE")) return from_torchrun(reader);
  if (reader.has("OMPI_COMM_WORLD_RANK") || reader.has("OMPI_COMM_WORLD_SIZE")) return from_open_mpi(reader);
  if (reader.has("SLURM_STEP_ID")) return from_slurm(reader);
  return {};
}

Variables launch_variables() {
  Variables variables;
  for (const char* name : kNames) {
    if (const char* value = std::getenv(name)) variables[name] = value;
  }
  return variables;
}

}  // namespace trueshard::comm
