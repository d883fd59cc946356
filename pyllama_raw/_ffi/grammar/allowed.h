// Says which tokens a grammar allows next, and takes the token that was sampled.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "matcher.h"

namespace grammar {

// A grammar with triggers waits until the first of these is in the output.
struct Triggers {
    std::vector<std::string> texts;
    std::vector<llama_token> tokens;
};

// What *token* writes; a control token its name.
inline std::string text_of(const llama_vocab * vocab, llama_token token) {
    std::string text(256, '\0');
    for (;;) {
        const auto    size = static_cast<int32_t>(text.size());
        const int32_t n    = llama_token_to_piece(vocab, token, text.data(), size, 0, true);
        text.resize(std::abs(n));  // negative: it did not fit
        if (n >= 0) {
            return text;
        }
    }
}

}  // namespace grammar

// A grammar and the place in one output that it has come to.
struct plr_grammar {
    plr_grammar(const llama_vocab * vocab, const plr_llguidance & functions, const void * matcher,
                grammar::Triggers triggers)
        : vocab(vocab), matcher(functions, matcher), triggers(std::move(triggers)) {
        waits = !this->triggers.texts.empty() || !this->triggers.tokens.empty();
    }

    bool allows(llama_token token) {
        return waits || (is_end(token) ? ends(token) : matcher.allows(token));
    }

    // Sets the logits of tokens that are not allowed to -infinity.
    void apply(llama_token_data_array & view) {
        if (waits) {
            return;
        }
        const std::vector<uint32_t> bits = mask();
        for (size_t i = 0; i < view.size; ++i) {
            if (!has(bits, view.data[i].id)) {
                view.data[i].logit = -INFINITY;
            }
        }
    }

    void accept(llama_token token) {
        if (waits) {
            wait(token);
        } else if (!is_end(token)) {
            matcher.consume({static_cast<uint32_t>(token)});
        } else if (!ends(token)) {
            throw std::runtime_error("the grammar does not end here");
        }
    }

private:
    const llama_vocab * vocab;
    grammar::Matcher    matcher;
    grammar::Triggers   triggers;
    std::string         last;  // text in which a trigger may begin
    bool                waits;

    bool is_end(llama_token token) const { return llama_vocab_is_eog(vocab, token); }

    std::vector<uint32_t> mask() { return matcher.mask(llama_vocab_n_tokens(vocab)); }

    static bool has(const std::vector<uint32_t> & bits, llama_token id) {
        return (bits.at(id / 32) >> (id % 32)) & 1;
    }

    // Asks the mask, because a matcher that can only end takes no token.
    bool ends(llama_token token) { return has(mask(), token); }

    // The text of the grammar begins with its trigger.
    void wait(llama_token token) {
        const auto & tokens = triggers.tokens;
        if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) {
            waits = false;
            matcher.consume({static_cast<uint32_t>(token)});
            return;
        }
        last += grammar::text_of(vocab, token);
        size_t longest = 1;
        for (const std::string & text : triggers.texts) {
            const size_t found = last.find(text);
            if (found != std::string::npos) {
                waits = false;
                matcher.consume(std::string_view(last).substr(found));
                return;
            }
            longest = std::max(longest, text.size());
        }
        last.erase(0, last.size() - std::min(last.size(), longest - 1));
    }
};
