// Follows a text through a grammar: all places where the text may be, each with the rules to
// return to.
//
// Equal places are one place, and what follows a byte is looked for once and kept. So the cost
// of an ambiguous grammar is the number of its places, not the number of ways to them. The
// machine throws if there are too many places.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "program.h"

namespace grammar {

// A node, and a stack of nodes to return to. At the node END the text is complete.
using Place = uint64_t;
constexpr int32_t END = INT32_MAX;

constexpr Place   place(int32_t node, int32_t stack) { return Place(node) << 32 | stack; }
constexpr int32_t node_of(Place p) { return static_cast<int32_t>(p >> 32); }
constexpr int32_t stack_of(Place p) { return static_cast<int32_t>(p & UINT32_MAX); }

using Places = std::vector<Place>;  // in rising order

struct HashPlaces {
    size_t operator()(const Places & places) const {
        uint64_t hash = 14695981039346656037u;  // FNV-1a
        for (const Place p : places) {
            hash = (hash ^ p) * 1099511628211u;
        }
        return hash ^ hash >> 29;
    }
};

class Machine {
public:
    static constexpr int32_t DEAD = 0;  // the state without places

    explicit Machine(std::shared_ptr<const Program> program) : program(std::move(program)) {
        intern({});
    }

    int32_t start() {
        begin_closure();
        close(program->start, 0);
        return intern_found();
    }

    // After *byte*; DEAD if it cannot follow.
    int32_t after(int32_t state, uint8_t byte) {
        const int32_t known = states[state].next[byte];
        if (known != UNKNOWN) {
            return known;
        }
        const Places & places = *states[state].places;
        begin_closure();
        count(places.size() / 64);  // takes about as long as one place that is reached
        for (const Place p : places) {
            const plr_node * node = at(p);
            if (node != nullptr && node->op == PLR_OP_BYTES && program->sets[node->arg][byte]) {
                close(node->next, stack_of(p));
            }
        }
        const int32_t next        = intern_found();
        states[state].next[byte] = next;
        return next;
    }

    // After *token*, at places where the grammar names tokens.
    int32_t after_token(int32_t state, llama_token token) {
        begin_closure();
        for (const Place p : *states[state].places) {
            const plr_node * node = at(p);
            if (node != nullptr && names(*node, token)) {
                close(node->next, stack_of(p));
            }
        }
        return intern_found();
    }

    int32_t either(int32_t a, int32_t b) {
        Places both;
        std::set_union(states[a].places->begin(), states[a].places->end(),
                       states[b].places->begin(), states[b].places->end(),
                       std::back_inserter(both));
        return intern(std::move(both));
    }

    bool ends(int32_t state) const {
        const Places & places = *states[state].places;
        return !places.empty() && node_of(places.back()) == END;
    }

    // Calls use(node) for each place that names tokens.
    template <typename Use>
    void each_token(int32_t state, Use && use) const {
        for (const Place p : *states[state].places) {
            const plr_node * node = at(p);
            if (node != nullptr && node->op != PLR_OP_BYTES) {
                use(*node);
            }
        }
    }

    static bool names(const plr_node & node, llama_token token) {
        return (node.op == PLR_OP_TOKEN && node.arg == token) ||
               (node.op == PLR_OP_NOT_TOKEN && node.arg != token);
    }

    // Begins to count work anew. If much is kept, forgets all but *state*; returns its number.
    int32_t begin_row(int32_t state) {
        work = 0;
        if (size() <= max_size) {
            return state;
        }
        Machine fresh(program);
        const int32_t same = fresh.adopt(*this, state);
        fresh.max_size     = KEPT + 2 * fresh.size();
        *this              = std::move(fresh);
        return same;
    }

    // Takes over a state of another machine of the same program.
    int32_t adopt(const Machine & other, int32_t state) {
        std::unordered_map<int32_t, int32_t> stacks = {{0, 0}};  // theirs to ours
        Places places;
        for (const Place p : *other.states[state].places) {
            std::vector<int32_t> above;
            int32_t theirs = stack_of(p);
            for (; stacks.count(theirs) == 0; theirs = other.cells[theirs].below) {
                above.push_back(theirs);
            }
            int32_t stack = stacks[theirs];
            for (auto it = above.rbegin(); it != above.rend(); ++it) {
                stack = stacks[*it] = push(other.cells[*it].node, stack);
            }
            places.push_back(place(node_of(p), stack));
        }
        std::sort(places.begin(), places.end());
        return intern(std::move(places));
    }

private:
    static constexpr int32_t UNKNOWN = -1;
    static constexpr size_t  KEPT    = 250'000;  // units of about 16 bytes

    struct Cell {
        int32_t node;
        int32_t below;
    };
    struct State {
        const Places *       places;  // the key in ids
        std::vector<int32_t> next;    // by byte
    };

    std::shared_ptr<const Program> program;
    std::vector<Cell>                                cells = {{0, 0}};  // 0: the empty stack
    std::unordered_map<uint64_t, int32_t>            cell_ids;
    std::vector<State>                               states;
    std::unordered_map<Places, int32_t, HashPlaces>  ids;
    std::unordered_set<Place>                        seen;
    std::vector<Place>                               todo;
    Places  found;
    size_t  n_places = 0;  // of all states
    size_t  max_size = KEPT;
    int64_t work     = 0;

    size_t size() const { return 64 * states.size() + n_places + cells.size(); }

    const plr_node * at(Place p) const {
        return node_of(p) == END ? nullptr : &program->nodes[node_of(p)];
    }

    int32_t push(int32_t node, int32_t below) {
        const auto [it, is_new] = cell_ids.try_emplace(place(node, below), cells.size());
        if (is_new) {
            cells.push_back({node, below});
        }
        return it->second;
    }

    void begin_closure() {
        seen  = {};  // clear() would walk through all buckets that it ever had
        found = {};
    }

    void count(int64_t n) {
        work += n;
        if (work > PLR_GRAMMAR_MAX_WORK) {
            throw std::runtime_error("the grammar is too ambiguous: one token takes more than " +
                                     std::to_string(PLR_GRAMMAR_MAX_WORK) +
                                     " places, give it fewer ways to read one text");
        }
    }

    // Finds the places that are reached from *node* without reading anything.
    void close(int32_t node, int32_t stack) {
        todo.assign(1, place(node, stack));
        while (!todo.empty()) {
            const Place p = todo.back();
            todo.pop_back();
            if (!seen.insert(p).second) {
                continue;
            }
            count(1);
            visit(program->nodes[node_of(p)], p);
        }
    }

    void visit(const plr_node & node, Place p) {
        const int32_t stack = stack_of(p);
        switch (node.op) {
        case PLR_OP_SPLIT:
            todo.push_back(place(node.next, stack));
            todo.push_back(place(node.arg, stack));
            break;
        case PLR_OP_CALL: {
            const bool is_last = program->nodes[node.next].op == PLR_OP_RETURN;
            todo.push_back(place(node.arg, is_last ? stack : push(node.next, stack)));
            break;
        }
        case PLR_OP_RETURN:
            if (stack == 0) {
                found.push_back(place(END, 0));
            } else {
                todo.push_back(place(cells[stack].node, cells[stack].below));
            }
            break;
        default:
            found.push_back(p);
        }
    }

    int32_t intern_found() {
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return intern(std::move(found));
    }

    int32_t intern(Places && places) {
        const size_t n = places.size();
        const auto [it, is_new] = ids.try_emplace(std::move(places), states.size());
        if (is_new) {
            states.push_back({&it->first, std::vector<int32_t>(256, UNKNOWN)});
            n_places += n;
        }
        return it->second;
    }
};

}  // namespace grammar
