// Functions of ggml's CPU backend that we call beside those of libllama.
//
// A linked library has them as symbols. Where the backend is a plug-in (variant.h), nobody may
// link them: a plug-in whose symbols are global would serve another llama.cpp in the process, too.
// So they are looked up in the file that the registered backend is from.
#pragma once

#include <dlfcn.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"

#pragma weak ggml_graph_plan
#pragma weak ggml_graph_compute
#pragma weak ggml_get_type_traits_cpu

struct CpuBackend {
    decltype(&ggml_graph_plan)          graph_plan    = nullptr;
    decltype(&ggml_graph_compute)       graph_compute = nullptr;
    decltype(&ggml_get_type_traits_cpu) type_traits   = nullptr;

    // All three or none. Backends are registered before the first call.
    static const CpuBackend & get() {
        static const CpuBackend one = look_up();
        return one;
    }

  private:
    static CpuBackend look_up() {
        CpuBackend one{ggml_graph_plan, ggml_graph_compute, ggml_get_type_traits_cpu};
        if (one.graph_plan != nullptr) {
            return one;
        }
        // Any function of the backend says which file it is from. That file is open already.
        ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
        void * known = cpu ? ggml_backend_reg_get_proc_address(cpu, "ggml_backend_set_n_threads") : nullptr;
        Dl_info place{};
        void * file = known != nullptr && dladdr(known, &place) != 0 && place.dli_fname != nullptr
                          ? dlopen(place.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                          : nullptr;
        if (file == nullptr) {
            return {};
        }
        one = {symbol<decltype(one.graph_plan)>(file, "ggml_graph_plan"),
               symbol<decltype(one.graph_compute)>(file, "ggml_graph_compute"),
               symbol<decltype(one.type_traits)>(file, "ggml_get_type_traits_cpu")};
        return one.graph_plan && one.graph_compute && one.type_traits ? one : CpuBackend{};
    }

    template <typename Function>
    static Function symbol(void * file, const char * name) {
        return reinterpret_cast<Function>(dlsym(file, name));
    }
};
