// SPDX-License-Identifier: BSD-3-Clause
// "ddp vs fsdp": fp16 training that was less accurate once it was sharded. Four mistakes were behind it; this program
// makes each of them beside what is right, and shows what this library does about it. Then the whole loop (fp16,
// scaler, accumulation, clip, schedule, batch norm) in four stages against one rank. Usage: report_ddp_vs_fsdp [steps]
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <set>
#include <string>

#include "torchscript_examples/reports/report.h"

namespace reports {
namespace {

using trueshard::Stage;
constexpr int kRanks = 4, kLeaves = 8;
constexpr int64_t kBatch = 16;
constexpr double kLimit = 0.5;

// Embedding, batch norm, linear: batch norm is what a blind cast to 16 bit hurts first.
struct NormNetImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  torch::nn::Linear up{nullptr}, head{nullptr};
  NormNetImpl() {
    embed = register_module("embed", torch::nn::Embedding(kTokens, 24));
    bn = register_module("bn", torch::nn::BatchNorm1d(24));
    up = register_module("up", torch::nn::Linear(24, 48));
    head = register_module("head", torch::nn::Linear(48, kTokens));
    const torch::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(1);
    for (const auto& item : named_parameters()) {
      if (item.key().rfind("bn", 0) != 0) item.value().copy_(torch::randn(item.value().sizes(), generator) * 0.4);
    }
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return head->forward(torch::gelu(up->forward(bn->forward(embed->forward(tokens)))));
  }
};
TORCH_MODULE(NormNet);

torch::Tensor norm_loss(NormNet& net, const torch::Tensor& tokens) {
  return torch::nn::functional::cross_entropy(net->forward(tokens).to(torch::kFloat),
                                              (tokens * 5 + 11).remainder(kTokens));
}

trueshard::ShardOptions fp16(Stage stage) {
  return trueshard::ShardOptions().stage(stage).gradient_divide_factor(kLeaves).mp_policy(
      trueshard::MixedPrecisionPolicy().param_dtype(torch::kHalf));
}

// The loop of the thread, done right. Leaves are the same eight for every number of ranks.
torch::Tensor train(const Group& group, Stage stage, int steps) {
  NormNet net;
  auto optimizer = trueshard::shard(*net, torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(5e-3)),
                                    group, fp16(stage));
  trueshard::ShardedGradScaler scaler(group, trueshard::GradScalerOptions().init_scale(1024).growth_interval(4));
  torch::optim::StepLR schedule(*optimizer, 4, 0.7);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    for (int64_t leaf = group->getRank(); leaf < kLeaves; leaf += group->getSize())
      scaler.scale(norm_loss(net, batch(step, leaf, kBatch))).backward();
    scaler.unscale_(*optimizer);
    trueshard::clip_grad_norm_(*optimizer, kLimit);
    if (scaler.step(*optimizer)) schedule.step();
    scaler.update();
  }
  std::vector<torch::Tensor> weights;
  const auto parameters = net->named_parameters();
  const auto state = trueshard::full_state_dict(*optimizer);
  for (const auto& item : parameters) weights.push_back(state[item.key()]);  // batch statistics are each rank's own
  return flat(weights);
}

std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

struct Finding {
  bool right = false;
  std::string today, here;
};

std::string shortened(const std::string& text, const std::string& needle) {
  const auto at = text.find(needle);
  return at == std::string::npos ? "(no such error) " + text : "error on all ranks: \"..." + needle + "...\"";
}

// One backward over all leaves of a rank; returns what `use` makes of it on rank 0.
template <typename Use>
void after_backward(Stage stage, double scale, const Use& use) {
  run_ranks(kRanks, [&](int rank, const Group& group) {
    NormNet net;
    auto optimizer = trueshard::shard(*net, torch::optim::SGD(net->parameters(), 0.1), group, fp16(stage));
    trueshard::ShardedGradScaler scaler(group, trueshard::GradScalerOptions().init_scale(scale));
    for (int64_t leaf = rank; leaf < kLeaves; leaf += kRanks)
      scaler.scale(norm_loss(net, batch(0, leaf, kBatch))).backward();
    use(rank, net, *optimizer, scaler);
  });
}

Finding local_norm() {
  Finding finding;
  std::vector<double> local(kRanks), global(kRanks);
  after_backward(Stage::Zero2, 1.0, [&](int rank, NormNet&, auto& optimizer, auto& scaler) {
    scaler.unscale_(optimizer);
    double squares = 0;
    for (const auto& shard : optimizer.param_groups().front().params()) {
      if (shard.grad().defined()) squares += std::pow(shard.grad().norm().template item<double>(), 2);
    }
    local[static_cast<size_t>(rank)] = std::sqrt(squares);
    global[static_cast<size_t>(rank)] = trueshard::clip_grad_norm_(optimizer, kLimit);
  });
  std::string text;
  after_backward(Stage::Zero2, 1.0, [&](int rank, NormNet& net, auto&, auto&) {
    const auto said = thrown([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), kLimit); });
    if (rank == 0) text = said;
  });
  char line[160];
  std::snprintf(line, sizeof line, "each rank's own norm: %.4f %.4f %.4f %.4f; the model's: %.4f", local[0], local[1],
                local[2], local[3], global[0]);
  finding.today = line;
  finding.here = shortened(text, "Use trueshard::clip_grad_norm_");
  finding.right =
      std::set<double>(global.begin(), global.end()).size() == 1 && text.find("clip_grad_norm_") != std::string::npos;
  return finding;
}

Finding clip_while_scaled() {
  Finding finding;
  double scaled = 0, unscaled = 0;
  std::string text;
  after_backward(Stage::Zero2, 1024.0, [&](int rank, NormNet&, auto& optimizer, auto& scaler) {
    const auto said = thrown([&] { trueshard::clip_grad_norm_(optimizer, kLimit); });
    scaler.unscale_(optimizer);
    const double norm = trueshard::clip_grad_norm_(optimizer, kLimit);
    if (rank != 0) return;
    text = said;
    unscaled = norm;
    scaled = norm * 1024.0;
  });
  char line[160];
  std::snprintf(line, sizeof line,
                "norm of the scaled gradients: %.1f, clipped to %.1f, %.0f times too small; the true norm: %.4f",
                scaled, kLimit, 1024.0, unscaled);
  finding.today = line;
  finding.here = shortened(text, "call ShardedGradScaler::unscale_(optimizer) first");
  finding.right = text.find("unscale_") != std::string::npos;
  return finding;
}

Finding sixteen_bit_sums() {
  Finding finding;
  // 2048 + 1 + 1 + 1: fp16 has no 2049.
  const std::vector<float> leaves{2048, 1, 1, 1};
  auto sum = torch::tensor(leaves[0], torch::kHalf);
  for (size_t i = 1; i < leaves.size(); ++i) sum = sum + torch::tensor(leaves[i], torch::kHalf);
  double ours = 0;
  run_ranks(kRanks, [&](int rank, const Group& group) {
    torch::manual_seed(0);
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    auto optimizer = trueshard::shard(*net, torch::optim::SGD(net->parameters(), 0.0), group,
                                      fp16(Stage::Zero2).gradient_divide_factor(1.0));
    net->forward(torch::full({1, 1}, leaves[static_cast<size_t>(rank)], torch::kHalf)).sum().backward();
    optimizer->finish_reduction();
    const auto shard = optimizer->param_groups().front().params().at(0);
    if (shard.numel() > 0) ours = shard.grad().item<double>();
  });
  char line[96];
  std::snprintf(line, sizeof line, "fp16 gradients 2048, 1, 1, 1 summed in fp16: %.0f", sum.item<double>());
  finding.today = line;
  std::snprintf(line, sizeof line, "%.0f: fp32 sums always, there is no setting to lose", ours);
  finding.here = line;
  finding.right = ours == 2051.0;
  return finding;
}

Finding cast_norm_layers() {
  Finding finding;
  NormNet cast;
  cast->to(torch::kHalf);
  const auto running = cast->bn->running_var.scalar_type();
  bool kept = false;
  run_ranks(kRanks, [&](int rank, const Group& group) {
    NormNet net;
    auto optimizer = trueshard::shard(*net, torch::optim::SGD(net->parameters(), 0.1), group, fp16(Stage::Zero3));
    if (rank == 0) {
      kept = net->bn->running_var.scalar_type() == torch::kFloat && net->bn->weight.scalar_type() == torch::kFloat &&
             net->up->weight.scalar_type() == torch::kHalf;
    }
  });
  finding.today =
      std::string("module.to(fp16): running variance is ") + c10::toString(running) + ", small updates are lost";
  finding.here = "batch norm's weights and statistics stay fp32, the rest computes in fp16";
  finding.right = kept;
  return finding;
}

void print(const char* title, const Finding& finding) {
  std::printf("%s\n  today: %s\n  here:  %s\n", title, finding.today.c_str(), finding.here.c_str());
}

int report(int steps) {
  bool right = true;
  const auto show = [&](const char* title, const Finding& finding) {
    print(title, finding);
    right &= finding.right;
  };
  show("1. clipping by the norm of this rank's shard", local_norm());
  show("2. clipping gradients that are still scaled", clip_while_scaled());
  show("3. gradients summed in 16 bit", sixteen_bit_sums());
  show("4. norm layers and buffers cast to 16 bit", cast_norm_layers());

  torch::Tensor alone;
  run_ranks(1, [&](int, const Group& group) { alone = train(group, Stage::Replicated, steps); });
  std::printf("\n%d steps in fp16 with scaler, accumulation, clip and schedule, %d leaves a step\n", steps, kLeaves);
  std::printf("  1 rank x 8 passes, replicated   %016llx\n", static_cast<unsigned long long>(digest(alone)));
  for (const auto stage : {Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
    std::vector<torch::Tensor> weights(kRanks);
    run_ranks(kRanks,
              [&](int rank, const Group& group) { weights[static_cast<size_t>(rank)] = train(group, stage, steps); });
    for (const auto& each : weights) right &= digest(each) == digest(alone);
    std::printf("  4 ranks x 2 passes, stage %d     %016llx\n", static_cast<int>(stage),
                static_cast<unsigned long long>(digest(weights[0])));
  }
  std::printf("Each mistake is an error or cannot be made, and sharding changes no bit: %s.\n",
              right ? "promise kept" : "promise BROKEN");
  return right ? 0 : 1;
}

}  // namespace
}  // namespace reports

int main(int argc, char** argv) {
  try {
    return reports::report(argc > 1 ? std::max(1, std::atoi(argv[1])) : 20);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "report_ddp_vs_fsdp: %s\n", error.what());
    return 2;
  }
}
