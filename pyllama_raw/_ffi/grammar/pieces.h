// What the tokens of a vocabulary write, in the order in which grammars walk through it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

struct plr_pieces {
    std::vector<std::string> texts;   // by token; control tokens by their names
    std::vector<bool>        is_end;  // by token; ends of generation
    std::vector<llama_token> ends;
    std::vector<llama_token> sorted;  // of those that write something
    std::vector<size_t>      shared;  // bytes that sorted[i] and sorted[i - 1] begin with

    explicit plr_pieces(const llama_vocab * vocab) {
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        std::string buffer(256, '\0');
        for (llama_token token = 0; token < n_tokens; ++token) {
            int32_t n = read(vocab, token, buffer);
            if (n < 0) {
                buffer.resize(-n);
                n = read(vocab, token, buffer);
            }
            texts.emplace_back(buffer, 0, n);
            is_end.push_back(llama_vocab_is_eog(vocab, token));
            if (is_end.back()) {
                ends.push_back(token);
            } else if (writes(token)) {
                sorted.push_back(token);
            }
        }
        std::sort(sorted.begin(), sorted.end(),
                  [&](llama_token a, llama_token b) { return texts[a] < texts[b]; });
        for (size_t i = 0; i < sorted.size(); ++i) {
            const std::string_view text = texts[sorted[i]];
            const std::string_view last = i == 0 ? "" : std::string_view(texts[sorted[i - 1]]);
            const size_t n = std::min(text.size(), last.size());
            shared.push_back(std::mismatch(text.begin(), text.begin() + n, last.begin()).first -
                             text.begin());
        }
    }

    bool writes(llama_token token) const {
        return !texts[token].empty() && texts[token][0] != '\0';
    }

private:
    static int32_t read(const llama_vocab * vocab, llama_token token, std::string & buffer) {
        return llama_token_to_piece(vocab, token, buffer.data(),
                                    static_cast<int32_t>(buffer.size()), 0, true);
    }
};
