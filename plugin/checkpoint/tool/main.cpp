// SPDX-License-Identifier: BSD-3-Clause
// trueshard-checkpoint: looks into checkpoints, verifies, exports and compares them. Needs no torch.
#include <CLI/CLI.hpp>

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plugin/checkpoint/dtype.h"
#include "plugin/checkpoint/tool/commands.h"

namespace tool = trueshard::checkpoint::tool;

int main(int argc, char** argv) {
  CLI::App app("Looks into trueshard checkpoints (and safetensors files), verifies, exports and compares them.",
               "trueshard-checkpoint");
  app.require_subcommand(1);
  app.set_version_flag("--version", TRUESHARD_VERSION);
  tool::Output output;
  std::string path;
  bool all_tensors = false;
  tool::ExportRequest request;
  tool::DiffRequest difference;

  auto* inspect = app.add_subcommand("inspect", "what is in it: step, world size, options, tensors, sizes");
  inspect->add_option("path", path, "a checkpoint, a folder of safetensors files, or one file")->required();
  inspect->add_flag("--tensors", all_tensors, "list every tensor");
  auto* verify = app.add_subcommand("verify", "reads everything and compares every checksum");
  verify->add_option("path", path, "a checkpoint")->required();
  auto* write =
      app.add_subcommand("export", "writes the weights as plain safetensors, with an index when they are large");
  write->add_option("path", request.path, "a checkpoint")->required();
  write->add_option("folder", request.folder, "where to write model.safetensors")->required();
  write->add_option("--dtype", request.dtype, "of parameters; buffers keep theirs")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  write->add_option("--entry", request.entry, "which of several modules");
  write->add_option("--max-file-bytes", request.most_file_bytes, "start another file beyond this")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  write->add_flag("--force", request.force, "write over files that are there");
  auto* compare = app.add_subcommand("diff", "the first tensors, elements and values that differ; status 1 if any do");
  compare->add_option("a", difference.a, "a checkpoint, folder or file")->required();
  compare->add_option("b", difference.b, "another")->required();
  compare->add_option("--limit", difference.most_shown, "tensors to show")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  for (auto* command : {inspect, verify, write, compare})
    command->add_flag("--json", output.json, "one JSON object on stdout, for programs");
  CLI11_PARSE(app, argc, argv);

  output.progress = !output.json && ::isatty(STDERR_FILENO) != 0;
  try {
    if (*inspect) return tool::inspect(path, all_tensors, output);
    if (*verify) return tool::verify(path, output);
    if (*write) return tool::export_weights(request, output);
    return tool::diff(difference, output);
  } catch (const std::exception& error) {
    if (output.json) std::cout << nlohmann::json{{"ok", false}, {"error", error.what()}}.dump() << std::endl;
    std::fprintf(stderr, "trueshard-checkpoint: %s\n", error.what());
    return 2;
  }
}
