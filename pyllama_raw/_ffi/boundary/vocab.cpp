#include "vocab.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "exceptions.h"

namespace {

// A run of characters of one class, and the longest one so far.
struct Run {
    int64_t now = 0, longest = 0;

    void take(bool goes_on) {
        now     = goes_on ? now + 1 : 0;
        longest = std::max(longest, now);
    }
};

// Bytes of the white space beyond ASCII that *text* begins with; 0: it begins with none.
size_t wide_blank(std::string_view text) {
    static constexpr std::string_view BLANKS[] = {
        "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\xA8", "\xE2\x80\xA9",
        "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80",
    };
    for (const std::string_view blank : BLANKS) {
        if (text.substr(0, blank.size()) == blank) {
            return blank.size();
        }
    }
    const bool spaces = text.substr(0, 2) == "\xE2\x80" && text.size() > 2;  // U+2000 to U+200A
    return spaces && static_cast<unsigned char>(text[2]) <= 0x8A ? 3 : 0;
}

// Runs *body* on a thread with a stack of *stack_bytes*; throws what it throws.
template <typename Body>
void on_own_stack(int64_t stack_bytes, Body body) {
    struct Call {
        Body &             body;
        std::exception_ptr error;
    } call{body, nullptr};
    const auto run = [](void * data) -> void * {
        auto * call = static_cast<Call *>(data);
        try {
            Guard guard;  // assertions of ggml throw
            call->body();
        } catch (...) {
            call->error = std::current_exception();
        }
        return nullptr;
    };

    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) {
        throw std::bad_alloc();
    }
    pthread_t thread;
    int code = pthread_attr_setstacksize(&attributes, static_cast<size_t>(stack_bytes));
    if (code == 0) {
        code = pthread_create(&thread, &attributes, run, &call);
    }
    pthread_attr_destroy(&attributes);
    if (code != 0) {
        throw std::runtime_error("no thread with a stack of " + std::to_string(stack_bytes >> 10) +
                                 " KiB can be started: " + std::strerror(code));
    }
    pthread_join(thread, nullptr);
    if (call.error) {
        std::rethrow_exception(call.error);
    }
}

}  // namespace

void plr_text_stretches(const char * text, int64_t text_len, plr_stretches * stretches) {
    // Patterns match runs of letters, of what is no blank, of blanks, and of letters with
    // spaces between them; also blanks behind what is none. Letters beyond ASCII are not told
    // from other characters there.
    Run     blanks, digits, prose;
    int64_t word = 0, longest = 0, blank_end = 0;  // word: what is no blank, and blanks behind it
    for (int64_t i = 0; i < text_len; ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        if ((byte & 0xC0) == 0x80) {
            continue;  // within a character
        }
        const bool wide = byte >= 0x80;
        if (wide) {
            blank_end = i + wide_blank({text + i, static_cast<size_t>(text_len - i)});
        }
        const bool was_blank = blanks.now > 0;
        const bool letter    = static_cast<unsigned char>((byte | 0x20) - 'a') < 26;
        blanks.take(byte == ' ' || (byte >= '\t' && byte <= '\r') || i < blank_end);
        digits.take(byte >= '0' && byte <= '9');
        prose.take(wide || letter || byte == ' ');
        word    = was_blank && blanks.now == 0 ? 2 : word + 1;  // a blank may begin it
        longest = std::max(longest, word);
    }
    stretches->word   = std::max(longest, prose.longest);
    stretches->blanks = blanks.longest;
    stretches->digits = digits.longest;
}

int plr_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len,
                 llama_token * tokens, int32_t n_tokens_max, bool add_special,
                 bool parse_special, int64_t stack_bytes, int32_t * n_tokens) {
    *n_tokens = 0;
    return attempt([&] {
        const auto tokenize = [&] {
            *n_tokens = llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special,
                                       parse_special);
        };
        if (stack_bytes == 0) {
            tokenize();
        } else {
            on_own_stack(stack_bytes, tokenize);
        }
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
