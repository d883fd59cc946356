#include "vocab.h"

#include <algorithm>
#include <cstdlib>

#include "exceptions.h"

int plr_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len,
                 llama_token * tokens, int32_t n_tokens_max, bool add_special,
                 bool parse_special, int32_t * n_tokens) {
    *n_tokens = 0;
    return attempt([&] {
        *n_tokens = llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special,
                                   parse_special);
    });
}

int64_t plr_vocab_pieces(const llama_vocab * vocab, char * pieces, int64_t size, int64_t * ends) {
    return guarded<int64_t>(PLR_EXCEPTION, [&] {
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        int64_t end = 0;
        for (int32_t token = 0; token < n_tokens; ++token) {
            const int64_t room = std::clamp<int64_t>(size - end, 0, INT32_MAX);
            const int32_t n = llama_token_to_piece(vocab, token, pieces + std::min(end, size),
                                                   static_cast<int32_t>(room), 0, false);
            end += std::abs(n);  // negative: it did not fit
            ends[token] = end;
        }
        return end;
    });
}

void plr_vocab_eog(const llama_vocab * vocab, bool * is_eog) {
    const int32_t n_tokens = llama_vocab_n_tokens(vocab);
    for (int32_t token = 0; token < n_tokens; ++token) {
        is_eog[token] = llama_vocab_is_eog(vocab, token);
    }
}
