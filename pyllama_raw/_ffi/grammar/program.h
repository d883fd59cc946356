// A checked copy of the nodes and sets of a grammar (grammar.h).
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "grammar.h"

namespace grammar {

struct Program {
    std::vector<plr_node>         nodes;
    std::vector<std::bitset<256>> sets;
    int32_t                       start;
};

// Throws if a number would lead a machine out of its arrays.
inline std::shared_ptr<const Program> make_program(const plr_node * nodes, size_t n_nodes,
                                                   const uint32_t * sets, size_t n_sets,
                                                   int32_t start) {
    auto program = std::make_shared<Program>();
    program->nodes.assign(nodes, nodes + n_nodes);
    program->start = start;
    for (size_t i = 0; i < n_sets; ++i) {
        std::bitset<256> & set = program->sets.emplace_back();
        for (size_t b = 0; b < 256; ++b) {
            set[b] = sets[8 * i + b / 32] >> b % 32 & 1;
        }
    }
    const auto check = [](int32_t index, size_t n) {
        if (index < 0 || static_cast<size_t>(index) >= n) {
            throw std::out_of_range("no such node or set in the program of the grammar");
        }
    };
    check(start, n_nodes);
    for (const plr_node & node : program->nodes) {
        const bool is_jump = node.op == PLR_OP_SPLIT || node.op == PLR_OP_CALL;
        check(node.op, PLR_OP_NOT_TOKEN + 1);
        check(node.next, n_nodes);
        check(is_jump ? node.arg : 0, n_nodes);
        check(node.op == PLR_OP_BYTES ? node.arg : 0, node.op == PLR_OP_BYTES ? n_sets : 1);
    }
    return program;
}

}  // namespace grammar
