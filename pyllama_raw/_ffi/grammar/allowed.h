// Says which tokens a grammar allows next, and takes the token that was sampled.
#pragma once

#include <cmath>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "machine.h"
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
    plr_grammar(const plr_pieces & pieces, std::shared_ptr<const grammar::Program> program,
                grammar::Triggers triggers)
        : pieces(pieces), machine(program), program(program), triggers(std::move(triggers)) {
        state = machine.start();
        waits = !this->triggers.texts.empty() || !this->triggers.tokens.empty();
    }

    plr_grammar(const plr_grammar & other)
        : pieces(other.pieces), machine(other.program), program(other.program),
          triggers(other.triggers), held(other.held), joined(other.joined), waits(other.waits) {
        state = machine.adopt(other.machine, other.state);
    }

    void begin_row() { state = machine.begin_row(state); }

    bool allows(llama_token token) {
        if (waits) {
            return true;
        }
        if (pieces.is_end.at(token)) {
            return machine.ends(state);
        }
        return pieces.writes(token) && after(token, pieces.texts[token]) != machine.DEAD;
    }

    // Sets the logits of tokens that are not allowed to -infinity.
    void apply(llama_token_data_array & view) {
        if (waits) {
            return;
        }
        const std::vector<bool> allowed = mask();
        for (size_t i = 0; i < view.size; ++i) {
            if (!allowed.at(view.data[i].id)) {
                view.data[i].logit = -INFINITY;
            }
        }
    }

    // By token: whether it is allowed.
    std::vector<bool> mask() {
        std::vector<bool> allowed(pieces.texts.size(), waits);
        if (waits) {
            return allowed;
        }
        for (const llama_token token : pieces.ends) {
            allowed[token] = machine.ends(state);
        }
        allow_named(allowed);
        allow_texts(allowed);
        return allowed;
    }

    void accept(llama_token token) {
        if (waits) {
            wait(token);
        } else if (!pieces.is_end.at(token)) {
            go_on(token, pieces.texts[token]);
        } else if (!machine.ends(state)) {
            throw std::runtime_error("the grammar does not end here");
        }
    }

private:
    const plr_pieces & pieces;
    grammar::Machine   machine;
    std::shared_ptr<const grammar::Program> program;
    grammar::Triggers  triggers;
    // The last tokens, in which a trigger may begin, and their text.
    std::deque<std::pair<llama_token, std::string>> held;
    std::string joined;
    int32_t     state;
    bool        waits;

    int32_t after(llama_token token, std::string_view text) {
        int32_t next = state;
        for (size_t i = 0; i < text.size() && next != machine.DEAD; ++i) {
            next = machine.after(next, static_cast<uint8_t>(text[i]));
        }
        return machine.either(next, machine.after_token(state, token));
    }

    // Allows tokens that the grammar names. If it names a token that must not come, it allows
    // all others; if it names two such tokens, at places of their own, it allows both.
    void allow_named(std::vector<bool> & allowed) const {
        constexpr llama_token all = -1, none = -2;
        llama_token but = none;
        machine.each_token(state, [&](const plr_node & node) {
            if (node.op == PLR_OP_NOT_TOKEN) {
                but = but == none || but == node.arg ? node.arg : all;
            } else if (!pieces.is_end.at(node.arg) && pieces.writes(node.arg)) {
                allowed[node.arg] = true;
            }
        });
        for (const llama_token token : pieces.sorted) {
            allowed[token] = allowed[token] || (but != none && token != but);
        }
    }

    // Walks through all texts in order, so that a beginning that texts share is read once.
    void allow_texts(std::vector<bool> & allowed) {
        constexpr size_t     none = SIZE_MAX;
        size_t               dead = none;  // bytes after which the last text was refused
        std::vector<int32_t> path = {state};
        for (size_t i = 0; i < pieces.sorted.size(); ++i) {
            const std::string & text = pieces.texts[pieces.sorted[i]];
            if (pieces.shared[i] >= dead) {
                continue;
            }
            dead = none;
            path.resize(pieces.shared[i] + 1);
            while (dead == none && path.size() <= text.size()) {
                const uint8_t byte = static_cast<uint8_t>(text[path.size() - 1]);
                const int32_t next = machine.after(path.back(), byte);
                if (next == machine.DEAD) {
                    dead = path.size();
                } else {
                    path.push_back(next);
                }
            }
            if (dead == none) {
                allowed[pieces.sorted[i]] = true;
            }
        }
    }

    void go_on(llama_token token, std::string_view text) {
        const int32_t next = after(token, text);
        if (next == machine.DEAD) {
            throw std::runtime_error("the grammar does not allow '" + std::string(text) + "'");
        }
        state = next;
    }

    void wait(llama_token token) {
        const auto & tokens = triggers.tokens;
        if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) {
            waits = false;
            go_on(token, pieces.texts[token]);
            return;
        }
        held.emplace_back(token, pieces.texts.at(token));
        joined += held.back().second;
        size_t longest = 0;
        for (const std::string & text : triggers.texts) {
            const size_t found = joined.find(text);
            if (found != std::string::npos) {
                waits = false;
                replay(found);
                return;
            }
            longest = std::max(longest, text.size());
        }
        while (!held.empty() && joined.size() - held.front().second.size() >= longest) {
            joined.erase(0, held.front().second.size());
            held.pop_front();
        }
    }

    // The text of the grammar begins at *start* of what was held.
    void replay(size_t start) {
        size_t begin = 0;
        for (const auto & [token, text] : held) {
            const size_t end  = begin + text.size();
            const size_t from = std::max(begin, start);
            if (end > start) {
                go_on(token, std::string_view(joined).substr(from, end - from));
            }
            begin = end;
        }
        held   = {};
        joined = {};
    }
};
