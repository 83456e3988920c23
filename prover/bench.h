// Times of the kernels of a step and of whole steps, with what a device could do at most in their
// place: the bytes that they have to move at the rate of a copy, or their operations at the rate of
// multiply-adds, both measured (kernels/ceilings.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attest/base/progress.h"
#include "kernels/backend.h"
#include "kernels/ceilings.h"
#include "kernels/model/model.h"

namespace bitwitness {

struct BenchRow {
  std::string what;          // a name of bench_names()
  std::string shape;         // for people
  std::int64_t rows = 0;     // M: sequences of a decode step, tokens of a prefill
  std::int64_t context = 0;  // positions that the rows read, of a decode step: before the first one
  double seconds = 0;        // median; of a step: with commitment
  double bytes = 0;          // that have to be read or written at least
  double operations = 0;     // multiply-adds count twice
  double seconds_without_commitment = 0;  // of a step; else 0
};

struct BenchFloor {
  double seconds = 0;
  const char* bound = "";  // "bytes" or "operations", whichever takes longer
};
BenchFloor floor_of(const BenchRow& row, const Ceilings& ceilings);

struct BenchOptions {
  std::vector<std::string> only;   // names and groups of bench_names(); empty: all
  std::vector<std::int64_t> rows;  // only these numbers of rows; empty: all
  int repeat = 20;                 // steps that a median is taken of
};

// "group: name, name, ...", one group a line.
std::string bench_names();

// Calls on_row with each row when it is measured. Whole steps run `model`, or random weights where
// it is null; kernels run on random numbers of `config`'s shapes. Smaller plans on hosts. Throws a
// usage error for a name that does not exist or when nothing is left, an infrastructure error when
// memory does not suffice.
void run_bench(Backend& backend, const ModelConfig& config, const Model* model,
               const Ceilings& ceilings, const BenchOptions& options,
               const std::function<void(const BenchRow&)>& on_row, const ProgressFn& progress = {});

}  // namespace bitwitness
