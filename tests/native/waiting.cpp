// One thread waits for another that does not come until the first one sleeps; prints whether it
// was woken. The second one sees at once that all are here.
#include <atomic>
#include <iostream>
#include <thread>

#include "kernels/custom_node.h"

int main() {
    NodeState state{};
    state.reset();
    std::thread first([&] { state.wait_for_all(2); });
    while (__atomic_load_n(&state.n_asleep, __ATOMIC_SEQ_CST) == 0) {
        std::this_thread::yield();
    }
    state.wait_for_all(2);
    first.join();
    std::cout << "woken\n";
}
