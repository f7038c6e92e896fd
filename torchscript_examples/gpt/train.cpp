// SPDX-License-Identifier: BSD-3-Clause
// One rank of a data-parallel training run: an ordinary libtorch loop, and the lines that make it sharded.
// Started by proof.py, torchrun or mpirun, one process per rank. Set the same OMP_NUM_THREADS everywhere.
#include <trueshard/trueshard.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <iostream>

#include "torchscript_examples/gpt/arguments.h"
#include "torchscript_examples/gpt/corpus.h"
#include "torchscript_examples/gpt/journal.h"
#include "torchscript_examples/gpt/model.h"

namespace gpt {
namespace {

constexpr uint64_t kValidationKey = 0x76616c6964;  // in place of a step: validation windows are the same every time
constexpr double kPi = 3.14159265358979323846;

// Linear warm-up, then a cosine down to a tenth.
class WarmupCosine : public torch::optim::LRScheduler {
 public:
  WarmupCosine(torch::optim::Optimizer& optimizer, int64_t warmup, int64_t steps)
      : LRScheduler(optimizer), base_(get_current_lrs()), warmup_(warmup), steps_(steps) {
    step();  // the first step of the optimizer already runs with the schedule's rate
  }

 private:
  std::vector<double> get_lrs() override {
    const auto at = static_cast<double>(step_count_), warmup = static_cast<double>(warmup_);
    const double along = (at - warmup) / std::max(1.0, static_cast<double>(steps_) - warmup);
    const double factor = at < warmup ? (at + 1) / (warmup + 1) : 0.55 + 0.45 * std::cos(kPi * std::min(1.0, along));
    auto rates = base_;
    for (auto& rate : rates) rate *= factor;
    return rates;
  }
  std::vector<double> base_;
  int64_t warmup_, steps_;
};

// Matrices decay, biases and norms do not.
torch::optim::AdamW make_optimizer(const Model& model, double lr) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model.parameters()) (parameter.dim() < 2 ? vectors : matrices).push_back(parameter);
  auto options = torch::optim::AdamWOptions(lr).betas(std::make_tuple(0.9, 0.95)).weight_decay(0.1);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(options));
  options.weight_decay(0.0);
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(options));
  return torch::optim::AdamW(std::move(groups), options);
}

trueshard::ShardOptions shard_options(const Arguments& arguments, int world) {
  auto stage = trueshard::Stage::Replicated;
  if (arguments.stage == "zero1") stage = trueshard::Stage::Zero1;
  if (arguments.stage == "zero2") stage = trueshard::Stage::Zero2;
  if (arguments.stage == "zero3") stage = trueshard::Stage::Zero3;
  auto options = trueshard::ShardOptions()
                     .stage(stage)
                     .bucket_bytes(arguments.bucket_bytes)
                     .overlap(arguments.overlap == Switch::kOn)
                     .gradient_divide_factor(static_cast<double>(world * arguments.passes));
  if (arguments.dtype == "bf16") options.mp_policy(trueshard::MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  return options;
}

// FNV-1a over the bytes of the tensors: equal digests, equal bits.
std::string digest(const std::vector<torch::Tensor>& tensors) {
  uint64_t hash = 1469598103934665603ull;
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().contiguous();
    const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, hash);
  return text;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Trainer {
 public:
  Trainer(const Arguments& arguments, c10::intrusive_ptr<c10d::ProcessGroup> group)
      : arguments_(arguments),
        group_(std::move(group)),
        corpus_(read_corpus(arguments.corpus, arguments.corpus_bytes)),
        memory_at_start_(resident_bytes()),
        model_(GptOptions()
                   .context(arguments.context)
                   .width(arguments.width)
                   .heads(arguments.heads)
                   .layers(arguments.layers)
                   .tied(arguments.tied == Switch::kOn),
               arguments.script),
        optimizer_(
            model_.shard(make_optimizer(model_, arguments.lr), group_, shard_options(arguments, group_->getSize()))),
        scaler_(
            group_,
            trueshard::GradScalerOptions().init_scale(arguments.init_scale).growth_interval(arguments.growth_interval)),
        schedule_(*optimizer_, arguments.warmup, arguments.steps) {
    describe();
  }

  void run() {
    if (journal_.rank == 0) say_start();
    validate(0);
    for (int64_t step = 1; step <= arguments_.steps; ++step) {
      train_step(step);
      const bool last = step == arguments_.steps;
      if (journal_.rank == 0 && (step % arguments_.report_every == 0 || step == 1 || last)) say_step();
      if (last || (arguments_.validate_every > 0 && step % arguments_.validate_every == 0)) validate(step);
    }
    measure_memory();
    {
      trueshard::FullParametersGuard whole(*optimizer_);
      journal_.digest = digest(model_.parameters());
    }
    if (journal_.rank == 0 && arguments_.sample > 0) say_sample();
    if (!arguments_.log.empty()) write_journal(journal_, arguments_.log + "." + std::to_string(journal_.rank));
    gather({0.0});  // nobody leaves while another rank may still need the store
  }

 private:
  void describe() {
    journal_.rank = group_->getRank();
    journal_.world = group_->getSize();
    journal_.threads = at::get_num_threads();
    journal_.passes = arguments_.passes;
    for (const auto& parameter : model_.parameters()) journal_.parameters += parameter.numel();
    journal_.corpus_bytes = static_cast<int64_t>(corpus_.train.size() + corpus_.validation.size());
    journal_.corpus_files = corpus_.files;
    journal_.tokens_per_step = journal_.world * arguments_.passes * arguments_.batch * arguments_.context;
    journal_.stage = arguments_.stage;
    journal_.dtype = arguments_.dtype;
    journal_.overlap = arguments_.overlap == Switch::kOn ? "on" : "off";
    journal_.bucket_bytes = arguments_.bucket_bytes;
  }

  // Windows that belong to a leaf (or to a rank, in validation), whichever rank computes it.
  torch::Tensor batch(const std::string& text, uint64_t step, int64_t leaf) const {
    const WindowRequest request{arguments_.batch, arguments_.context + 1,
                                mix(arguments_.seed, step, static_cast<uint64_t>(leaf))};
    return torch::tensor(windows(text, request), torch::kLong).view({request.count, request.length});
  }

  void train_step(int64_t step) {
    const auto start = std::chrono::steady_clock::now();
    const double communicating = optimizer_->metrics().seconds_communicating;
    StepRecord record;
    record.step = step;
    record.scale = scaler_.get_scale();
    record.lr = optimizer_->param_groups().front().options().get_lr();

    optimizer_->zero_grad();
    std::vector<double> losses;
    for (int64_t pass = 0; pass < arguments_.passes; ++pass) {
      const int64_t leaf = pass * journal_.world + journal_.rank;
      auto loss = loss_of(model_, batch(corpus_.train, static_cast<uint64_t>(step), leaf));
      scaler_.scale(loss).backward();
      losses.push_back(loss.item<double>());
    }
    scaler_.unscale_(*optimizer_);
    record.norm = trueshard::clip_grad_norm_(*optimizer_, arguments_.max_norm);
    if (scaler_.step(*optimizer_)) schedule_.step();
    scaler_.update();

    record.seconds = seconds_since(start);
    record.communicating = optimizer_->metrics().seconds_communicating - communicating;
    record.loss = mean_over_leaves(losses);
    journal_.steps.push_back(record);
    journal_.skipped = scaler_.skipped_steps();
  }

  // Every rank's numbers, rank by rank.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine) {
    std::vector<at::Tensor> input{torch::tensor(mine, torch::kDouble)};
    std::vector<std::vector<at::Tensor>> output(1);
    for (int rank = 0; rank < journal_.world; ++rank) output[0].push_back(torch::empty_like(input[0]));
    group_->allgather(output, input)->wait();
    std::vector<std::vector<double>> all;
    for (const auto& tensor : output[0]) {
      const auto* data = tensor.const_data_ptr<double>();
      all.emplace_back(data, data + tensor.numel());
    }
    return all;
  }

  // Added up in the order of the leaves, so that the number does not depend on ranks x passes.
  double mean_over_leaves(const std::vector<double>& losses) {
    const auto all = gather(losses);
    double sum = 0;
    for (size_t pass = 0; pass < losses.size(); ++pass) {
      for (const auto& of_rank : all) sum += of_rank[pass];
    }
    return sum / static_cast<double>(losses.size() * all.size());
  }

  void validate(int64_t step) {
    if (arguments_.validate_every == 0) return;
    torch::NoGradGuard no_grad;
    model_.train(false);
    const auto loss = loss_of(model_, batch(corpus_.validation, kValidationKey, journal_.rank)).item<double>();
    model_.train(true);
    const double mean = mean_over_leaves({loss});
    journal_.validation.emplace_back(step, mean);
    if (journal_.rank == 0) std::printf("step %4" PRId64 "  validation loss %.4f\n", step, mean);
  }

  void measure_memory() {
    // Bytes per element, docs/design.md: compute copy, then gradients, AdamW's two moments and the master where it is
    // not part of the compute copy. ZeRO-3 has no compute copy; what is whole at the moment is left out of the ledger.
    // ZeRO-1 and 2 have one compute copy for all ranks of the host, where the system allows it.
    const bool zero3 = arguments_.stage == "zero3";
    const int64_t compute = zero3 ? 0 : arguments_.dtype == "bf16" ? 2 : 4;
    const int64_t sharded = zero3 || arguments_.dtype == "bf16" ? 4 + 8 + 4 : 4 + 8;
    const int64_t owners = arguments_.stage == "replicated" ? 1 : journal_.world;
    int64_t padded = 0;  // at most: 64 elements to align a parameter, 16 per rank to align its bucket's shards
    for (const auto& parameter : model_.parameters()) {
      padded += (parameter.numel() + 63) / 64 * 64 + 16 * journal_.world;
    }
    const auto memory = optimizer_->metrics().memory;
    const int64_t sharers = memory.parameters < compute * journal_.parameters ? journal_.world : 1;
    journal_.memory.formula = compute * journal_.parameters / sharers + sharded * journal_.parameters / owners;
    journal_.memory.formula_padded = compute * padded / sharers + sharded * padded / owners;
    journal_.memory.ledger = memory.between_steps() - (zero3 ? memory.parameters : 0);
    journal_.memory.process = resident_bytes() - memory_at_start_;
  }

  void say_start() const {
    std::printf("%" PRId64 " files, %.1f MB of text; %.2f M parameters; %d ranks x %" PRId64
                " passes; %s, %s compute, fp32 masters; %d thread%s per rank; %" PRId64 " tokens per step\n",
                corpus_.files, static_cast<double>(journal_.corpus_bytes) * 1e-6,
                static_cast<double>(journal_.parameters) * 1e-6, journal_.world, journal_.passes,
                journal_.stage.c_str(), journal_.dtype.c_str(), journal_.threads, journal_.threads == 1 ? "" : "s",
                journal_.tokens_per_step);
    std::fflush(stdout);
  }

  void say_step() const {
    const auto& last = journal_.steps.back();
    std::printf("step %4" PRId64
                "  loss %.4f  norm %8.4f  scale %9.0f  lr %.2e  %7.0f tokens/s  communicating %4.1f %%\n",
                last.step, last.loss, last.norm, last.scale, last.lr,
                static_cast<double>(journal_.tokens_per_step) / last.seconds, 100 * last.communicating / last.seconds);
    std::fflush(stdout);
  }

  // The trained model is still the user's module: it writes a little Python.
  void say_sample() {
    torch::NoGradGuard no_grad;
    model_.train(false);
    auto generator = at::detail::createCPUGenerator(arguments_.seed);
    std::string text = "def ";
    for (int64_t i = 0; i < arguments_.sample; ++i) {
      const auto known = std::min<size_t>(text.size(), static_cast<size_t>(arguments_.context));
      std::vector<int64_t> ids;
      for (const char c : text.substr(text.size() - known)) ids.push_back(static_cast<unsigned char>(c));
      auto logits = model_.forward(torch::tensor(ids, torch::kLong).unsqueeze(0)).select(1, -1).to(torch::kFloat);
      auto drawn = at::multinomial(torch::softmax(logits / 0.7, /*dim=*/-1), 1, /*replacement=*/false, generator);
      const auto byte = drawn.item<int64_t>();
      text += byte == '\n' || (byte >= ' ' && byte <= '~') ? static_cast<char>(byte) : '?';
    }
    model_.train(true);
    std::printf("---- what the trained model writes ----\n%s\n---------------------------------------\n", text.c_str());
    std::fflush(stdout);
  }

  const Arguments arguments_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Corpus corpus_;
  int64_t memory_at_start_;
  Model model_;
  std::unique_ptr<trueshard::ShardedOptimizer> optimizer_;
  trueshard::ShardedGradScaler scaler_;
  WarmupCosine schedule_;
  Journal journal_;
};

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  try {
    const auto arguments = gpt::parse_arguments(argc, argv);
    torch::manual_seed(arguments.seed);
    gpt::Trainer(arguments, trueshard::init_process_group()).run();
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
