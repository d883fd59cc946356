// Memory for the columns of the product that runs; it grows and is never given back.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

class Scratch {
  public:
    // False if there is no memory; then libllama computes.
    bool reserve(size_t n_bytes) {
        if (n_bytes > n_bytes_) {
            const size_t padded = (n_bytes + 63) / 64 * 64;
            data_.reset(static_cast<char *>(std::aligned_alloc(64, padded)));
            n_bytes_ = data_ ? n_bytes : 0;
        }
        return n_bytes <= n_bytes_;
    }

    char * data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(char * data) const { std::free(data); }
    };

    std::unique_ptr<char, Free> data_;
    size_t                      n_bytes_ = 0;
};
