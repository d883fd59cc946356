// Computes the batches of all contexts in one thread, and the next batch of each before it is
// asked for; and long jobs between them.
//
// libgomp keeps a pool of workers for each thread that computes. Once all pools together have
// more threads than there are CPUs, its barriers sleep instead of spinning: then two threads
// that compute slow each other, also while one of them is idle.
//
// Python needs some time between two steps. Usually all rows go on, and then the next batch is
// known as soon as a step is sampled: its decode is queued at once, and only its sampling waits
// until the caller asks for it. A caller that wants something else drops it.
//
// A long job, as the encode of an image, gives way where it can be interrupted: batches that
// wait are then computed in the midst of it, in the same thread. So a stream never waits for
// more than a part of the job. Both take half of the time if both want all of it.
#pragma once

#include <time.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "llama.h"
#include "step.h"

inline int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// CPU time of this thread. Where it waits for another it sleeps, so that does not count.
inline int64_t cpu_ns() {
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return int64_t(used.tv_sec) * 1000000000 + used.tv_nsec;
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
    bool                 ahead;  // queue the decode of the next one, if its batch is known
    bool                 encodes = false;  // the batch has sources: see plr_read_sources()
    const int8_t *       drafts  = nullptr;  // rows whose tokens are drafts: see plr_step()
    float *              hidden  = nullptr;  // where hidden states go: see plr_keep_hidden()
    bool                 hidden_of_rows = false;
};

class Runner;

// What takes seconds; it calls give_way() of its thread several times a second.
struct LongJob {
    std::function<void()> compute;  // does not throw
    bool                  is_done = false;
};

// A thread, and the runners that have something for it to compute: first come, first served.
class ComputeThread {
  public:
    explicit ComputeThread(int64_t (*clock)() = now_ns)
        : clock_(clock), thread_(&ComputeThread::run, this) {}

    // All runners are gone.
    ~ComputeThread() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            quits_ = true;
        }
        queued_.notify_all();
        thread_.join();
    }

    // False in a fork, which has no such thread: there nothing of this may be used or freed.
    bool is_here() const { return getpid() == pid_; }

    // Return when *job* has been computed. Long jobs are computed one after the other.
    void compute(LongJob & job) {
        std::unique_lock<std::mutex> lock(mutex_);
        long_jobs_.push_back(&job);
        queued_.notify_all();
        done_.wait(lock, [&job] { return job.is_done; });
    }

    // In a long job: compute the steps that wait, for as long as took_ns, the time since the
    // last call.
    //
    // Until a stream has gone on, it is up to MOST times as long: else the stream would wait for
    // two parts of the job, because beside rows of an image streams go on in every second step
    // only. Python needs some time between two steps, so the next one is waited for.
    void give_way(int64_t took_ns) {
        std::unique_lock<std::mutex> lock(mutex_);
        const int64_t start_ns = clock_(), n_sampled = n_sampled_;
        const auto    goes_on  = [&] {
            const bool has_sampled = n_sampled_ > n_sampled;
            return clock_() - start_ns < took_ns * (has_sampled ? 1 : MOST);
        };
        for (int64_t wait_ns = 0; goes_on() && comes(lock, wait_ns);) {
            turn_of_first(lock);
            wait_ns = took_ns / PATIENCE;
        }
    }

  private:
    friend class Runner;

    static constexpr int MOST     = 4;  // times took_ns
    static constexpr int PATIENCE = 4;  // the part of took_ns that a step is waited for

    void run();
    void turn_of_first(std::unique_lock<std::mutex> & lock);

    // Whether something is queued, or will be within wait_ns.
    bool comes(std::unique_lock<std::mutex> & lock, int64_t wait_ns) {
        return queued_.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                                [this] { return !queue_.empty(); });
    }

    std::mutex              mutex_;  // of all below, and of the runners
    std::condition_variable queued_;
    std::condition_variable done_;  // a long job
    std::list<Runner *>     queue_;
    std::list<LongJob *>    long_jobs_;
    Runner *                current_   = nullptr;  // whose turn it is
    int64_t                 n_sampled_ = 0;  // steps that sampled rows
    bool                    quits_     = false;

    int64_t (*const clock_)();
    const pid_t pid_ = getpid();
    std::thread thread_;  // last: it uses all of the above
};

// What one context has to compute. One thread at a time calls it.
class Runner {
  public:
    // decode() gives a libllama code, and looks at no rows: those may be of the next job, whose
    // decode comes ahead. sample() fills tokens, codes and times; it gives 1 if the batch was
    // advanced, 0 if not, or PLR_EXCEPTION.
    using Decode = int (*)(const Job &);
    using Sample = int (*)(const Job &);

    Runner(ComputeThread & thread, Decode decode, Sample sample)
        : thread_(thread), decode_(decode), sample_(sample) {}

    // Waits for what is being computed.
    ~Runner() {
        std::unique_lock<std::mutex> lock(thread_.mutex_);
        take_back();
        changed_.wait(lock, [this] { return !is_current(); });
    }

    bool is_here() const { return thread_.is_here(); }

    // Do *job*, or take over what was queued ahead, which must be the same batch. error() is
    // what failed, if the code is not 0 or a row has no token.
    int step(const Job & job) {
        std::unique_lock<std::mutex> lock(thread_.mutex_);
        job_   = job;
        asked_ = true;
        if (!is_current() && !is_queued()) {
            // Only its sampling is left: that is short, and the others have had their turn.
            queue(is_decoded_ ? thread_.queue_.begin() : thread_.queue_.end());
        }
        changed_.wait(lock, [this] { return !asked_; });
        return result_;
    }

    const char * error() const { return error_; }

    // Give up what was queued ahead; false if it had not begun. Else *stop* ends it, and this
    // waits until it is over.
    template <typename Stop>
    bool drop(Stop && stop) {
        std::unique_lock<std::mutex> lock(thread_.mutex_);
        if (take_back()) {
            return false;
        }
        if (is_current()) {
            stop(true);
            changed_.wait(lock, [this] { return !is_current(); });
            stop(false);
        }
        return std::exchange(is_decoded_, false);
    }

  private:
    friend class ComputeThread;

    bool is_current() const { return thread_.current_ == this; }
    bool is_queued() const { return place_.empty(); }

    void queue(std::list<Runner *>::iterator before) {
        in_queue_ = place_.begin();
        thread_.queue_.splice(before, place_);  // needs no memory, so it cannot fail
        thread_.queued_.notify_one();
    }

    bool take_back() {
        if (!is_queued()) {
            return false;
        }
        place_.splice(place_.begin(), thread_.queue_, in_queue_);
        return true;
    }

    // In the compute thread, which has the lock but while it computes: meanwhile nobody but
    // the caller of step(), who waits, changes the job.
    void turn(std::unique_lock<std::mutex> & lock) {
        if (!is_decoded_) {
            decode(lock);
        }
        if (asked_) {
            sample(lock);
        }
    }

    void decode(std::unique_lock<std::mutex> & lock) {
        const Job job = job_;  // a copy: the next job may come meanwhile
        lock.unlock();
        const int64_t start_ns = now_ns(), start_cpu_ns = cpu_ns();
        const int     code     = decode_(job);
        const int64_t used_ns  = cpu_ns() - start_cpu_ns;
        const int64_t took_ns  = now_ns() - start_ns;
        lock.lock();
        code_       = code;
        decode_ns_  = took_ns;
        cpu_ns_     = used_ns;
        is_decoded_ = true;
        if (code != 0) {
            note_error();
        }
    }

    void sample(std::unique_lock<std::mutex> & lock) {
        *job_.times = {decode_ns_, cpu_ns_, 0, 0};
        int advanced = 0;
        if (code_ == 0) {
            lock.unlock();
            advanced = sample_(job_);
            lock.lock();
            if (advanced < 0 || job_.times->n_failed > 0) {
                note_error();
            }
        }
        thread_.n_sampled_ += job_.n_rows > 0;
        result_ = advanced < 0 ? advanced : code_;
        is_decoded_ = asked_ = false;
        if (advanced > 0 && job_.ahead) {
            queue(thread_.queue_.end());
        }
    }

    // The message is this thread's, and the next one may be about another context.
    void note_error() { std::snprintf(error_, sizeof(error_), "%s", plr_last_error()); }

    ComputeThread & thread_;
    const Decode    decode_;
    const Sample    sample_;

    std::condition_variable       changed_;  // asked_, or whose turn it is
    std::list<Runner *>           place_{this};  // in the queue: there, and this is empty
    std::list<Runner *>::iterator in_queue_;
    Job     job_{};
    bool    asked_      = false;  // a call is not over
    bool    is_decoded_ = false;  // and not sampled
    int     code_       = 0;  // of the last decode
    int     result_     = 0;  // of the last step that was asked for
    int64_t decode_ns_  = 0;
    int64_t cpu_ns_     = 0;
    char    error_[2048] = "";
};

inline void ComputeThread::turn_of_first(std::unique_lock<std::mutex> & lock) {
    Runner * runner = current_ = queue_.front();
    runner->take_back();
    runner->turn(lock);
    current_ = nullptr;
    // With the lock: without it the runner might be gone. What is queued next begins before
    // anybody who is woken can take it back.
    runner->changed_.notify_all();
}

inline void ComputeThread::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        queued_.wait(lock, [this] { return !queue_.empty() || !long_jobs_.empty() || quits_; });
        if (queue_.empty() && long_jobs_.empty()) {
            return;
        }
        if (!queue_.empty()) {
            turn_of_first(lock);
        }
        if (!long_jobs_.empty()) {
            LongJob * job = long_jobs_.front();
            long_jobs_.pop_front();
            lock.unlock();
            job->compute();
            lock.lock();
            job->is_done = true;
            done_.notify_all();
        }
    }
}

struct plr_thread : ComputeThread {};
