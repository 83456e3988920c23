#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

TEST(ThreadPool, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads, [](int) {});
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t count : {0, 1, 2, 3, 4, 5, 6, 7, 64, 1000}) {
      for (const std::int64_t grain : {0, 1, 3, 1000}) {
        std::vector<int> seen(static_cast<std::size_t>(count), 0);
        std::vector<int> ranges(static_cast<std::size_t>(threads), 0);
        pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
          ++ranges[static_cast<std::size_t>(thread)];
          EXPECT_LT(begin, end);
          if (begin != 0 || end != count) {
            EXPECT_GE(end - begin, grain);
          }
          for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        for (std::int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(seen[static_cast<std::size_t>(i)], 1) << "index " << i << " of " << count;
        }
        for (const int n : ranges) EXPECT_LE(n, 1);
      }
    }
  }
}

TEST(ThreadPool, ManyShortLoops) {
  ThreadPool pool(3, [](int) {});
  std::vector<std::int64_t> sum(3, 0);
  for (int round = 0; round < 5000; ++round) {
    pool.parallel_for(3, 1, [&](std::int64_t begin, std::int64_t, int) {
      sum[static_cast<std::size_t>(begin)] += round;
    });
  }
  for (const std::int64_t s : sum) EXPECT_EQ(s, 5000 * 4999 / 2);
}

TEST(ThreadPool, StartRunsOnEveryThread) {
  std::vector<std::thread::id> ids(4);
  ThreadPool pool(
      4, [&](int thread) { ids[static_cast<std::size_t>(thread)] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(ids[i], ids[j]);
  }
}

TEST(ThreadPool, FailedStartThrows) {
  for (const int bad : {0, 1, 2}) {
    try {
      ThreadPool pool(3, [&](int thread) {
        if (thread >= bad) throw std::runtime_error("thread " + std::to_string(thread));
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& e) {
      EXPECT_EQ(std::string(e.what()), "thread " + std::to_string(bad));
    }
  }
}

TEST(ThreadPool, FirstExceptionIsThrownAndThePoolStaysUsable) {
  ThreadPool pool(3, [](int) {});
  std::atomic<int> finished{0};
  for (int round = 0; round < 50; ++round) {
    finished = 0;
    try {
      pool.parallel_for(3, 1, [&](std::int64_t begin, std::int64_t, int) {
        ++finished;
        if (begin >= 1) throw std::runtime_error(std::to_string(begin));
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "1");
    }
    EXPECT_EQ(finished, 3);
  }
  int calls = 0;
  pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(ThreadPool, LoopInsideALoopRunsOnItsThread) {
  ThreadPool pool(3, [](int) {});
  std::atomic<int> total{0};
  pool.parallel_for(3, 1, [&](std::int64_t, std::int64_t, int outer) {
    pool.parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end, int inner) {
      EXPECT_EQ(inner, outer);
      total += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(total, 30);
}

TEST(ThreadPool, LoopsFromSeveralThreadsTakeTurns) {
  ThreadPool pool(2, [](int) {});
  std::vector<std::int64_t> sums(3, 0);
  std::vector<std::thread> callers;
  for (std::size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 300; ++round) {
        std::atomic<std::int64_t> sum{0};
        pool.parallel_for(100, 1, [&](std::int64_t begin, std::int64_t end, int) {
          for (std::int64_t i = begin; i < end; ++i) sum += i;
        });
        sums[c] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::int64_t s : sums) EXPECT_EQ(s, 300 * 4950);
}

}  // namespace
}  // namespace bitwitness
