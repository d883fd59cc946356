// Knows which cell holds each position of each slot, in one pool of cells for all slots.
//
// libllama fills the lowest free cell first. So the cells of a slot ascend with position until
// lower cells of other slots are freed. Sums in the order of positions do not depend on where
// cells lie.
//
// The cells of computed tokens are read from the graph that fills them. The cells of a restored
// state are the lowest free ones, in the order of the state. A reader must compare a list with
// the mask, and use the order of cells if the mask shows others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

class Cells {
  public:
    // The cells of a slot by position, -1 where there is none; null if they ascend or are
    // unknown.
    const std::vector<int32_t> * disordered(int32_t slot) const {
        const bool is_known = slot >= 0 && size_t(slot) < slots_.size();
        return is_known && !slots_[slot].ascends ? &slots_[slot].cells : nullptr;
    }

    void write(int32_t slot, int32_t pos, int32_t cell) {
        if (slot < 0 || pos < 0 || pos > kMostPos) {
            return;
        }
        Slot & to = at(slot);
        if (size_t(pos) != to.cells.size()) {
            to.cells.resize(pos, -1);
            to.ascends = ascend(to.cells);
        }
        to.ascends = to.ascends && (pos == 0 || to.cells.back() < cell);
        to.cells.push_back(cell);
    }

    // Ranges are [p0, p1); a negative p1 is the end.
    void remove(int32_t slot, int32_t p0, int32_t p1) {
        Slot & from = at(slot);
        bound(from, p0, p1);
        std::fill(from.cells.begin() + p0, from.cells.begin() + p1, -1);
        settle(from);
    }

    void copy(int32_t src, int32_t dst, int32_t p0, int32_t p1) {
        if (src == dst) {
            return;
        }
        at(std::max(src, dst));  // may move both
        const Slot & from = at(src);
        Slot &       to   = at(dst);
        bound(from, p0, p1);
        to.cells.resize(std::max(to.cells.size(), size_t(p1)), -1);
        std::copy(from.cells.begin() + p0, from.cells.begin() + p1, to.cells.begin() + p0);
        settle(to);
    }

    void move(int32_t slot, int32_t p0, int32_t p1, int32_t delta) {
        Slot & of = at(slot);
        bound(of, p0, p1);
        const std::vector<int32_t> moved(of.cells.begin() + p0, of.cells.begin() + p1);
        std::fill(of.cells.begin() + p0, of.cells.begin() + p1, -1);
        for (size_t i = 0; i < moved.size(); ++i) {
            const int64_t pos = int64_t(p0) + int64_t(i) + delta;
            if (pos < 0 || pos > kMostPos) {
                continue;
            }
            of.cells.resize(std::max(of.cells.size(), size_t(pos) + 1), -1);
            of.cells[pos] = moved[i];
        }
        settle(of);
    }

    void clear() { slots_.clear(); }

    // *state* is what libllama has read into *slot*, which was empty; -1: into all slots.
    void restore(int32_t slot, const uint8_t * state, size_t size) {
        if (slot < 0) {
            if (!restore_all(state, size)) {
                clear();
            }
            return;
        }
        remove(slot, -1, -1);
        std::vector<bool> is_used;
        for (const Slot & other : slots_) {
            for (const int32_t cell : other.cells) {
                if (cell >= 0) {
                    is_used.resize(std::max(is_used.size(), size_t(cell) + 1));
                    is_used[cell] = true;
                }
            }
        }
        size_t cell = 0;
        for (const int32_t pos : positions(state, size)) {
            for (; cell < is_used.size() && is_used[cell]; ++cell) {
            }
            std::vector<int32_t> & cells = at(slot).cells;
            cells.resize(std::max(cells.size(), size_t(pos) + 1), -1);
            cells[pos] = int32_t(cell++);
        }
        settle(at(slot));
    }

  private:
    struct Slot {
        std::vector<int32_t> cells;
        bool                 ascends = true;
    };

    Slot & at(int32_t slot) {
        slots_.resize(std::max(slots_.size(), size_t(slot) + 1));
        return slots_[slot];
    }

    // The cells of a state of all slots are the first ones, each with all its slots.
    bool restore_all(const uint8_t * state, size_t size) {
        clear();
        const size_t n_words = size / sizeof(int32_t);
        if (n_words < 4 || word(state, 2) != 1) {
            return false;
        }
        size_t i = 4;
        for (int32_t cell = 0; cell < word(state, 3); ++cell) {
            if (i + 2 > n_words) {
                return false;
            }
            const int32_t pos = word(state, i), n_slots = word(state, i + 1);
            i += 2;
            if (pos < 0 || pos > kMostPos || n_slots < 1 || n_slots > kMostSlots ||
                i + size_t(n_slots) > n_words) {
                return false;
            }
            for (int32_t n = 0; n < n_slots; ++n, ++i) {
                const int32_t slot = word(state, i);
                if (slot < 0 || slot >= kMostSlots) {
                    return false;
                }
                std::vector<int32_t> & cells = at(slot).cells;
                cells.resize(std::max(cells.size(), size_t(pos) + 1), -1);
                cells[pos] = cell;
            }
        }
        std::for_each(slots_.begin(), slots_.end(), settle);
        return true;
    }

    static int32_t word(const uint8_t * state, size_t i) {
        int32_t value;
        std::memcpy(&value, state + i * sizeof(value), sizeof(value));
        return value;
    }

    static void bound(const Slot & slot, int32_t & p0, int32_t & p1) {
        const auto size = int32_t(slot.cells.size());
        p0 = std::clamp(p0, 0, size);
        p1 = p1 < 0 ? size : std::clamp(p1, p0, size);
    }

    static void settle(Slot & slot) {
        while (!slot.cells.empty() && slot.cells.back() < 0) {
            slot.cells.pop_back();
        }
        slot.ascends = ascend(slot.cells);
    }

    static bool ascend(const std::vector<int32_t> & cells) {
        return std::is_sorted(cells.begin(), cells.end());
    }

    // The positions of the cells in a state of one pool; empty if it is another state. It
    // begins with magic, slot, number of pools and number of cells; then each cell has its
    // position, its number of slots and the slot.
    static std::vector<int32_t> positions(const uint8_t * state, size_t size) {
        const size_t n_words = size / sizeof(int32_t);
        if (n_words < 4 || word(state, 2) != 1 || word(state, 3) < 0 ||
            n_words < 4 + 3 * size_t(word(state, 3))) {
            return {};
        }
        const auto           n_cells = size_t(word(state, 3));
        std::vector<int32_t> found;
        for (size_t i = 0; i < n_cells; ++i) {
            const int32_t pos = word(state, 4 + 3 * i);
            if (pos < 0 || pos > kMostPos || word(state, 5 + 3 * i) != 1) {
                return {};
            }
            found.push_back(pos);
        }
        return found;
    }

    static constexpr int32_t kMostPos   = 1 << 24;  // larger numbers are no positions
    static constexpr int32_t kMostSlots = 256;      // llama.cpp: LLAMA_MAX_SEQ

    std::vector<Slot> slots_;  // by slot
};
