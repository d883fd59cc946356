// Computes batches in a thread of its own, and the next one before it is asked for.
//
// Python needs some time between two steps. Usually all rows go on, and then the next batch is
// known as soon as a step is sampled: its decode begins at once, and only its sampling waits
// until the caller asks for it. A caller that wants something else drops it.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <thread>

#include "llama.h"
#include "step.h"

inline int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// One step, as plr_step() is asked for it.
struct Job {
    llama_context *      ctx;
    llama_batch *        batch;
    int32_t              n_rows;
    const int32_t *      rows;
    plr_sampler * const * samplers;
    llama_token *        tokens;
    int32_t *            codes;
    plr_times *          times;
    bool                 ahead;  // begin the next one, if its batch is known
};

class Runner {
  public:
    // decode() gives a libllama code. sample() fills tokens, codes and times; it gives
    // whether the batch was advanced.
    using Decode = int (*)(llama_context *, const llama_batch *);
    using Sample = bool (*)(const Job &);

    Runner(Decode decode, Sample sample)
        : decode_(decode), sample_(sample), pid_(getpid()), thread_(&Runner::run, this) {}

    ~Runner() {
        if (getpid() != pid_) {
            thread_.detach();  // after a fork there is no such thread
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            quits_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    // Do *job*, or take over what was begun ahead, which must be the same batch. error() is
    // what failed, if the code is not 0 or a row has no token.
    int step(const Job & job) {
        std::unique_lock<std::mutex> lock(mutex_);
        job_   = job;
        asked_ = true;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !asked_; });
        return result_;
    }

    const char * error() const { return error_; }

    // Give up what was begun ahead and wait until it is over; false if nothing was.
    template <typename Stop>
    bool drop(Stop && stop) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!is_ahead_) {
            return false;
        }
        stop(true);
        drops_ = true;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !is_ahead_; });
        drops_ = false;
        stop(false);
        return true;
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return asked_ || quits_; });
            if (quits_) {
                return;
            }
            const Job job = job_;  // what is begun ahead has the same context and batch
            lock.unlock();
            do {  // without the lock: a decode begins without waiting for who wakes up
                decode(lock, job);
                changed_.wait(lock, [this] { return asked_ || drops_ || quits_; });
                is_ahead_ = asked_ && !drops_ && !quits_ && sample(lock);
                result_   = code_;
                asked_    = false;
                lock.unlock();
                changed_.notify_all();  // who waits for the step, or drops it
            } while (is_ahead_);
            lock.lock();
        }
    }

    // The lock is open before and held afterwards.
    void decode(std::unique_lock<std::mutex> & lock, const Job & job) {
        const int64_t start_ns = now_ns();
        const int     code     = decode_(job.ctx, job.batch);
        const int64_t took_ns  = now_ns() - start_ns;
        lock.lock();
        code_      = code;
        decode_ns_ = took_ns;
        if (code != 0) {
            note_error();
        }
    }

    // Whether the next step is to be begun. The lock is open meanwhile: nobody but the caller,
    // who waits, changes the job.
    bool sample(std::unique_lock<std::mutex> & lock) {
        *job_.times = {decode_ns_, 0, 0};
        if (code_ != 0) {
            return false;
        }
        lock.unlock();
        const bool advanced = sample_(job_);
        lock.lock();
        if (job_.times->n_failed > 0) {
            note_error();
        }
        return advanced && job_.ahead;
    }

    void note_error() { std::snprintf(error_, sizeof(error_), "%s", plr_last_error()); }

    const Decode decode_;
    const Sample sample_;

    std::mutex              mutex_;  // of all below
    std::condition_variable changed_;
    Job     job_{};
    bool    asked_    = false;  // a call is not over
    bool    is_ahead_ = false;  // a decode was begun that nobody has asked for yet
    bool    drops_    = false;
    bool    quits_    = false;
    int     code_     = 0;  // of the last decode
    int     result_   = 0;  // of the last step that was asked for
    int64_t decode_ns_ = 0;
    char    error_[2048] = "";

    const pid_t pid_;
    std::thread thread_;  // last: it uses all of the above
};
