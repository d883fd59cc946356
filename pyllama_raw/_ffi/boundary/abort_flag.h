/* An abort flag libllama polls (CPU and Metal backends only). Any thread may set it. */
#pragma once

#include "llama.h"

typedef struct plr_flag plr_flag;
plr_flag * plr_flag_new(void);
void       plr_flag_free(plr_flag * flag);
void       plr_flag_set(plr_flag * flag, bool value);
void       plr_flag_attach(struct llama_context_params * params, plr_flag * flag);

#ifdef __cplusplus
#include <atomic>
#include <utility>
struct plr_flag {
    std::atomic<bool> value{false};
    std::atomic<bool> drops{false};  // what was begun ahead
};

// While one of these lives, no flag stops what its thread computes.
class Unstoppable {
  public:
    explicit Unstoppable(bool is_on) : before_(std::exchange(here(), is_on || here())) {}
    ~Unstoppable() { here() = before_; }
    Unstoppable(const Unstoppable &)             = delete;
    Unstoppable & operator=(const Unstoppable &) = delete;

    static bool & here() {
        thread_local bool value = false;
        return value;
    }

  private:
    const bool before_;
};
#endif
