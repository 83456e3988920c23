// Recorded steps on a CUDA device (Backend::make_recordings).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "kernels/backend.h"
#include "kernels/cuda/context.h"

namespace bitwitness::cuda {

// Steps as CUDA graphs. A step runs plainly the first time, which makes what recording must not
// (scratch, kernel attributes, comparisons of variants), is recorded the second time, and replayed
// from then on.
class CudaRecordings final : public Recordings {
 public:
  explicit CudaRecordings(Context& context) : context_(context) {}
  ~CudaRecordings() override { clear(); }
  CudaRecordings(const CudaRecordings&) = delete;
  CudaRecordings& operator=(const CudaRecordings&) = delete;

  void run(std::uint64_t key, const std::function<void()>& step) override {
    if (context_.memory.generation() != generation_) {
      clear();
      generation_ = context_.memory.generation();
    }
    if (const auto found = graphs_.find(key); found != graphs_.end()) {
      if (found->second == nullptr) found->second = record(step);
      BW_CUDA(cudaGraphLaunch(found->second, context_.stream));
      return;
    }
    step();
    constexpr std::size_t kMostGraphs = 128;
    if (graphs_.size() >= kMostGraphs) clear();
    if (context_.memory.generation() == generation_) graphs_.emplace(key, nullptr);
  }

 private:
  cudaGraphExec_t record(const std::function<void()>& step) {
    cudaGraph_t graph = nullptr;
    // Relaxed: a step may look at the device's attributes.
    BW_CUDA(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeRelaxed));
    try {
      step();
    } catch (...) {
      cudaStreamEndCapture(context_.stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      static_cast<void>(cudaGetLastError());
      throw;
    }
    BW_CUDA(cudaStreamEndCapture(context_.stream, &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    BW_CUDA(error);
    return executable;
  }

  void clear() noexcept {
    for (const auto& [key, graph] : graphs_) {
      if (graph != nullptr) cudaGraphExecDestroy(graph);
    }
    graphs_.clear();
  }

  Context& context_;
  std::uint64_t generation_ = 0;
  std::unordered_map<std::uint64_t, cudaGraphExec_t> graphs_;  // null: seen once
};

}  // namespace bitwitness::cuda
