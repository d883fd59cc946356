// Says which tokens a grammar allows next, and takes the token that was sampled.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "matcher.h"
#include "pieces.h"

namespace grammar {

// A grammar with triggers waits until the first of these is in the output.
struct Triggers {
    std::vector<std::string> texts;
    std::vector<llama_token> tokens;
};

}  // namespace grammar

// A grammar and the place in one output that it has come to.
struct plr_grammar {
    plr_grammar(const plr_pieces & pieces, grammar::Matcher matcher, grammar::Triggers triggers)
        : pieces(pieces), matcher(matcher), triggers(std::move(triggers)) {
        waits = !this->triggers.texts.empty() || !this->triggers.tokens.empty();
    }

    bool allows(llama_token token) {
        return waits || (pieces.is_end.at(token) ? ends(token) : matcher.allows(token));
    }

    // Sets the logits of tokens that are not allowed to -infinity.
    void apply(llama_token_data_array & view) {
        if (waits) {
            return;
        }
        const std::vector<uint32_t> bits = matcher.mask(pieces.texts.size());
        for (size_t i = 0; i < view.size; ++i) {
            if (!has(bits, view.data[i].id)) {
                view.data[i].logit = -INFINITY;
            }
        }
    }

    void accept(llama_token token) {
        if (waits) {
            wait(token);
        } else if (!pieces.is_end.at(token)) {
            matcher.consume({static_cast<uint32_t>(token)});
        } else if (!ends(token)) {
            throw std::runtime_error("the grammar does not end here");
        }
    }

private:
    const plr_pieces & pieces;
    grammar::Matcher   matcher;
    grammar::Triggers  triggers;
    std::string        last;  // text in which a trigger may begin
    bool               waits;

    static bool has(const std::vector<uint32_t> & bits, llama_token id) {
        return (bits.at(id / 32) >> (id % 32)) & 1;
    }

    // Asks the mask, because a matcher that can only end takes no token.
    bool ends(llama_token token) { return has(matcher.mask(pieces.texts.size()), token); }

    // The text of the grammar begins with its trigger.
    void wait(llama_token token) {
        const auto & tokens = triggers.tokens;
        if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) {
            waits = false;
            matcher.consume({static_cast<uint32_t>(token)});
            return;
        }
        last += pieces.texts.at(token);
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
