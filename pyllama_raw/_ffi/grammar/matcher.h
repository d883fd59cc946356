// A matcher of llguidance: where an output is in a grammar.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar.h"

namespace grammar {

class Matcher {
public:
    Matcher(const plr_llguidance & functions, const void * other) : functions(functions) {
        matcher = call<void *(const void *)>(functions.clone)(other);
    }

    Matcher(const Matcher &) = delete;

    ~Matcher() { call<void(void *)>(functions.free)(matcher); }

    bool allows(llama_token token) {
        const uint32_t id = token;
        const auto     validate =
            call<int32_t(void *, const uint32_t *, size_t)>(functions.validate);
        return checked(validate(matcher, &id, 1)) == 1;
    }

    // A bit for each token.
    std::vector<uint32_t> mask(size_t n_tokens) {
        std::vector<uint32_t> bits((n_tokens + 31) / 32);
        const auto fill = call<int32_t(void *, uint32_t *, size_t)>(functions.fill);
        checked(-(fill(matcher, bits.data(), bits.size() * sizeof(uint32_t)) != 0));
        return bits;
    }

    void consume(const std::vector<uint32_t> & tokens) {
        const auto consume =
            call<int32_t(void *, const uint32_t *, size_t)>(functions.consume);
        checked(-(consume(matcher, tokens.data(), tokens.size()) != 0));
    }

    void consume(std::string_view text) {
        const auto tokenize =
            call<size_t(const void *, const uint8_t *, size_t, uint32_t *, size_t)>(
                functions.tokenize);
        const auto * bytes = reinterpret_cast<const uint8_t *>(text.data());
        std::vector<uint32_t> tokens(text.size());
        tokens.resize(tokenize(functions.tokenizer, bytes, text.size(), tokens.data(),
                               tokens.size()));
        consume(tokens);
    }

private:
    plr_llguidance functions;
    void         * matcher;

    template <typename Function>
    static Function * call(void * address) {
        return reinterpret_cast<Function *>(address);
    }

    int32_t checked(int32_t result) {
        if (result >= 0) {
            return result;
        }
        const char * error = call<const char *(void *)>(functions.error)(matcher);
        const std::string_view said = error == nullptr ? "nothing can follow" : error;
        throw std::runtime_error("grammar: " + std::string(said.substr(0, said.find('\n'))));
    }
};

}  // namespace grammar
