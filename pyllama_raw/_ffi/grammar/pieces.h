// What the tokens of a vocabulary write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

struct plr_pieces {
    std::vector<std::string> texts;   // by token; control tokens by their names
    std::vector<bool>        is_end;  // by token; ends of generation

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
        }
    }

private:
    static int32_t read(const llama_vocab * vocab, llama_token token, std::string & buffer) {
        return llama_token_to_piece(vocab, token, buffer.data(),
                                    static_cast<int32_t>(buffer.size()), 0, true);
    }
};
