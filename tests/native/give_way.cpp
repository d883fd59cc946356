// Plays steps beside a long job, by a clock that only steps move; prints what was computed.
//
//     give_way STEP...
//
// A step is R, which computes rows of a prompt, or T, a token of a stream, and how long it takes:
// per cent of a part of the job. They come over and over. An L is printed for each part.
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "boundary/errors.h"
#include "step/runner.h"

const char * plr_last_error(void) { return ""; }

static constexpr int64_t PART_NS   = int64_t(4) * 3600 * 1000000000;  // waits outlast a test
static constexpr int     N_BORDERS = 5;  // with steps

static std::atomic<int64_t> clock_ns{0};
static std::string          computed;  // of the compute thread

static int decode(const Job & job) {
    clock_ns += PART_NS / 100 * job.batch->n_tokens;
    return 0;
}

static int sample(const Job & job) {
    computed += job.n_rows > 0 ? 'T' : 'R';
    return 0;
}

int main(int argc, char ** argv) {
    ComputeThread     thread([] { return clock_ns.load(); });
    Runner            runner(thread, decode, sample);
    std::atomic<bool> is_over{false};
    std::thread       engine([&] {
        for (int i = 0; argc > 1 && !is_over; ++i) {
            const char * step  = argv[1 + i % (argc - 1)];
            llama_batch  batch = {};
            plr_times    times = {};
            batch.n_tokens     = std::atoi(step + 1);
            runner.step({nullptr, &batch, *step == 'T', nullptr, nullptr, nullptr, nullptr, &times, false});
        }
    });
    LongJob job;
    job.compute = [&] {
        for (int n_borders = 0; n_borders < N_BORDERS;) {
            computed += 'L';
            thread.give_way(PART_NS);
            n_borders += argc == 1 || computed.back() != 'L';
        }
    };
    thread.compute(job);
    is_over = true;
    engine.join();
    std::cout << computed << '\n';
}
