#pragma once

#include <new>
#include <type_traits>

#include "optim/cuda_blocks.cuh"
#include "optim/cuda_stage.cuh"

namespace gpumode::optim {

template <class Update>
__device__ Job job_of(const Entry& entry) {
  Job job;
  job.numel = entry.row.numel;
  job.hyper = entry.hyper;
  job.step = static_cast<double>(entry.step) + 1.0;
  job.scalar = entry.scalar;
  if ((Update::kAccess & kIsOfItsTensor) != 0) {
    for (int k = 0; k < kMaxSums; ++k) job.sums[k] = entry.sums[k];
  }
  return job;
}

// One warp, which fills the stages.
template <class T, class Update>
class Producer {
 public:
  __device__ Producer(const Launch& launch, Shared<Update>* shared, unsigned char* memory,
                      uint32_t num_stages)
      : launch_(launch), shared_(*shared), memory_(memory), num_stages_(num_stages) {
    if (lane() < num_stages) shared_.stages[lane()].tensor.number = kNone;
    __syncwarp();
  }

  __device__ void run() {
    Deal<Update> deal(launch_, &shared_.deal);
    for (; deal.has_hand(); deal.next(row_.first_tile, row_.end_tile)) {
      for (uint32_t i = 0; i < launch_.hand; ++i) add_unit(&deal, i);
    }
    end_row();
    count_rows();
    shared_.empty[turn_.stage].wait(turn_.phase ^ 1);
    if (lane() == 0) shared_.stages[turn_.stage].is_end = true;
    Loads(&shared_.full[turn_.stage]).arrive();
  }

 private:
  // A row of which this block has had `num_done` tiles.
  struct Part {
    uint32_t number, first_tile, end_tile, num_done;
    float *step, *scalar;
    float next_step, next_scalar;
  };

  static __device__ uint32_t lane() { return threadIdx.x % kLanes; }

  template <class Words>
  static __device__ void copy(Words* to, const Words& from) {
    static_assert(sizeof(Words) % sizeof(uint32_t) == 0);
    for (uint32_t i = lane(); i < sizeof(Words) / sizeof(uint32_t); i += kLanes) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
    }
  }

  __device__ void add_unit(Deal<Update>* deal, uint32_t i) {
    const uint32_t first = deal->first_tile(i), last = deal->last_tile(i);
    const uint32_t most = Update::kAccess == kReadsGrad ? launch_.grads_at_once : 1;
    for (uint32_t tile = first; tile < last;) {
      const Entry* entry = nullptr;  // if the tile before was of another row
      if (tile < row_.first_tile || row_.end_tile <= tile) {
        entry = &deal->entry(i);
        if (tile != first || entry->number == kNone) entry = &deal->look_up(tile);
        begin_row(*entry);
      }
      const uint32_t num_tiles = min(min(last, row_.end_tile) - tile, most);
      // Without a gradient there is nothing to do, but to say that its sums are 0.
      const bool has_sums = Update::kNumSums > 0 && launch_.sums != nullptr;
      if (grad_ != nullptr || has_sums) push(entry, tile, num_tiles);
      row_.num_done += num_tiles;
      tile += num_tiles;
    }
  }

  __device__ void begin_row(const Entry& entry) {
    end_row();
    const Row& row = entry.row;
    grad_ = entry.grad;
    row_ = {entry.number, row.first_tile, row.first_tile + row.num_tiles, 0, row.step, row.scalar};
  }

  // Each lane remembers one row that is done: to count takes microseconds.
  __device__ void end_row() {
    const bool has_step = grad_ != nullptr && launch_.is_last_pass;
    if (Update::kNumSums > 0 || !has_step) return;
    if (lane() == num_pending_) pending_ = row_;
    if (++num_pending_ == kLanes) count_rows();
  }

  // Of the rows that are done, this block needs the step no more. When no block does, it is
  // counted.
  __device__ void count_rows() {
    if (lane() < num_pending_ && takes_last(&launch_.tickets[pending_.number], pending_.num_done,
                                            pending_.end_tile - pending_.first_tile)) {
      if ((Update::kAccess & kWritesScalar) != 0) *pending_.scalar = pending_.next_scalar;
      if (pending_.step != nullptr) *pending_.step = pending_.next_step;
    }
    __syncwarp();
    num_pending_ = 0;
  }

  // Makes the tensor's part of a stage.
  __device__ void describe(Tensor<Update>* tensor, const Entry& entry) {
    copy(&tensor->row, entry.row);
    const Row& row = entry.row;
    if constexpr (!std::is_empty_v<Update>) {
      const Job job = job_of<Update>(entry);
      const bool is_same = tensor_ != nullptr && (Update::kAccess & kIsOfItsTensor) == 0 &&
                           tensor_->row.group == row.group && step_ == job.step;
      step_ = job.step;
      if (is_same) {  // what many tensors share; to make it takes a microsecond
        copy(&tensor->update, tensor_->update);
      } else if (lane() == 0) {
        new (tensor->update) Update(job);
      }
      row_.next_step = static_cast<float>(job.step);
      if constexpr ((Update::kAccess & kWritesScalar) != 0) {
        row_.next_scalar = static_cast<float>(Update::next_scalar(job));
      }
    }
    if ((launch_.stochastic || has_blocks(row)) && lane() <= kMaxStates) {
      tensor->keys[lane()] =
          random_key(launch_.seed, static_cast<uint64_t>(step_), row.number, lane());
    }
    if (lane() != 0) return;
    tensor->grad = grad_;
    tensor->number = entry.number;
    uint32_t offset = 0;
    const auto place = [&](int operand, unsigned access, const void* memory, DType dtype) {
      tensor->offsets[operand] = offset;
      const bool is_loaded = (Update::kAccess & access) != 0 && memory != nullptr;
      if (!is_loaded) return;
      offset += row.tile_length * size_of(dtype);
      if (dtype == DType::U8) offset += kTileOfBlocks / kBlock;
    };
    place(kParamOperand, kReadsParam, row.param, row.param_dtype);
    place(kMasterOperand, kReadsParam, row.master, row.master_dtype);
    for (int k = 0; k < Update::kNumStates; ++k) {
      place(kStateOperand + k, kReadsStates, row.states[k], row.state_dtypes[k]);
    }
    place(kGradOperand, kReadsGrad, grad_, row.grad_dtype);  // last, since it may be of many tiles
  }

  // `entry` unless the tile before was of the same row.
  __device__ void push(const Entry* entry, uint32_t tile, uint32_t num_tiles) {
    shared_.empty[turn_.stage].wait(turn_.phase ^ 1);
    Stage<Update>& stage = shared_.stages[turn_.stage];
    const bool is_there = stage.tensor.number == row_.number;
    __syncwarp();  // all have looked before one writes
    if (entry != nullptr) {
      describe(&stage.tensor, *entry);
    } else if (!is_there) {
      copy(&stage.tensor, *tensor_);
    }
    __syncwarp();
    tensor_ = &stage.tensor;
    const Row& row = stage.tensor.row;
    const int64_t first = static_cast<int64_t>(tile - row.first_tile) * row.tile_length;
    const auto length = static_cast<uint32_t>(
        min(row.numel - first, static_cast<int64_t>(num_tiles) * row.tile_length));
    const bool is_vector = row.load_unit != 0 && reinterpret_cast<uintptr_t>(grad_) % 16 == 0;
    const uint32_t num_loaded = is_vector ? length & ~(row.load_unit - 1u) : 0;
    if (lane() == 0) {
      stage.first = first;
      stage.length = length;
      stage.num_loaded = num_loaded;
      stage.tile = tile;
      stage.num_tiles = num_tiles;
      stage.is_end = false;
    }
    Loads loads(&shared_.full[turn_.stage]);
    unsigned char* memory = memory_ + turn_.stage * launch_.stage_bytes;
    const auto load = [&](int operand, const void* from, DType dtype) {
      if (from == nullptr) return;
      loads.add(memory + stage.tensor.offsets[operand],
                static_cast<const char*>(from) + first * size_of(dtype),
                num_loaded * size_of(dtype));
    };
    if (Update::kAccess & kReadsParam) {
      load(kParamOperand, row.param, row.param_dtype);
      load(kMasterOperand, row.master, row.master_dtype);
    }
    if (Update::kAccess & kReadsGrad) load(kGradOperand, grad_, row.grad_dtype);
    if (Update::kAccess & kReadsStates) {
#pragma unroll
      for (int k = 0; k < Update::kNumStates; ++k) {
        load(kStateOperand + k, row.states[k], row.state_dtypes[k]);
        if (row.states[k] == nullptr || row.state_dtypes[k] != DType::U8) continue;
        uint8_t* const exponents = exponent_at(row.states[k], row.numel, first);
        loads.add(memory + stage.tensor.offsets[kStateOperand + k] + kTileOfBlocks, exponents,
                  static_cast<uint32_t>(in_vectors(num_loaded / kBlock)));
        if (lane() != 0) continue;
        stage.exponents[k] = exponents;
        stage.keys[k] = random_key_at(stage.tensor.keys[1 + k], first);
      }
    }
    loads.arrive();
    turn_.next(num_stages_);
  }

  const Launch& launch_;
  Shared<Update>& shared_;
  unsigned char* const memory_;
  const uint32_t num_stages_;
  Turn turn_;
  const Tensor<Update>* tensor_ = nullptr;  // in the stage that was made last
  double step_ = 0.0;                       // of it
  const void* grad_ = nullptr;              // of the row that it is at
  Part row_{}, pending_{};
  uint32_t num_pending_ = 0;
};

}  // namespace gpumode::optim
