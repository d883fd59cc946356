#include "vocab.h"

#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

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

bool is_blank(char byte) {
    return std::isspace(static_cast<unsigned char>(byte)) != 0;
}

constexpr int IS_SPECIAL =
    LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;

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

int32_t plr_text_parts(const llama_vocab * vocab, const char * text, int32_t text_len,
                       bool parse_special, const llama_token * specials, int32_t n_specials,
                       int32_t n_markers, int32_t * ends, int32_t max_ends, int32_t * most) {
    *most = 0;
    return guarded<int32_t>(PLR_EXCEPTION, [&] {
        const std::string_view all(text, static_cast<size_t>(text_len));
        std::vector<uint32_t> longest(all.size());  // bytes of the longest that begins there
        std::vector<std::string_view> stripping;    // those that take blanks in front of them
        bool strips = false;
        for (int32_t i = 0; i < n_specials; ++i) {
            const int attr = llama_vocab_get_attr(vocab, specials[i]);
            if (!parse_special && (attr & LLAMA_TOKEN_ATTR_USER_DEFINED) == 0) {
                continue;
            }
            const std::string_view name = llama_vocab_get_text(vocab, specials[i]);
            if (name.empty()) {
                continue;
            }
            strips |= (attr & (LLAMA_TOKEN_ATTR_LSTRIP | LLAMA_TOKEN_ATTR_RSTRIP)) != 0;
            if (attr & LLAMA_TOKEN_ATTR_LSTRIP) {
                stripping.push_back(name);
            }
            for (size_t at = all.find(name); at != all.npos; at = all.find(name, at + 1)) {
                longest[at] = std::max(longest[at], static_cast<uint32_t>(name.size()));
            }
        }
        int32_t n_ends = 0, n_here = 0;
        for (size_t at = 0, end = 0; at < all.size(); at = std::max(end, at + 1)) {
            if (longest[at] == 0) {
                continue;
            }
            // What overlaps or touches nothing outside: libllama takes the longest name first.
            bool    is_longest = true, is_run = true;
            int32_t n_cluster = 0;
            size_t  taken     = at;
            end               = at + longest[at];
            for (size_t i = at; i < end; ++i) {
                is_run &= text[i] == text[at];
                if (longest[i] == 0) {
                    continue;
                }
                is_longest &= i == at || longest[i] < longest[at];
                end = std::max(end, i + longest[i]);
                if (i >= taken) {
                    ++n_cluster;
                    taken = i + longest[i];
                }
            }
            const std::string_view name = all.substr(at, longest[at]);
            const bool moves = strips && (is_blank(name.front()) || is_blank(name.back()) ||
                                          std::count(stripping.begin(), stripping.end(), name) > 0);
            const bool is_certain = (is_longest || is_run) && !moves;
            if (n_here >= n_markers && is_certain && n_ends < max_ends) {
                ends[n_ends++] = static_cast<int32_t>(at);
                n_here         = 0;
            }
            n_here += n_cluster;
            *most = std::max(*most, n_here);
        }
        return n_ends;
    });
}

int32_t plr_vocab_specials(const llama_vocab * vocab, llama_token * specials) {
    int32_t       n        = 0;
    const int32_t n_tokens = llama_vocab_n_tokens(vocab);
    for (llama_token token = 0; token < n_tokens; ++token) {
        if (llama_vocab_get_attr(vocab, token) & IS_SPECIAL) {
            specials[n++] = token;
        }
    }
    return n;
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
