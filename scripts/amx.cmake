# Flags for ggml's AMX files; build_lib.py has cmake read this file behind project("ggml").
#
# GCC before 14 declares that ldtilecfg reads 8 bytes of the 64 that it reads. So GCC removes
# the other stores to the tile configuration as dead, and the first product ends the process
# (llama.cpp issue 20824). Without the two passes that remove dead stores GCC keeps all. Only
# these files pay for that.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    file(GLOB amx_files "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/*.cpp")
    if(amx_files)
        # Deferred, because cmake does not know the folder "src" before it has entered it.
        cmake_language(DEFER CALL set_source_files_properties ${amx_files} DIRECTORY src
            PROPERTIES COMPILE_OPTIONS "-fno-tree-dse;-fno-dse")
    endif()
endif()
