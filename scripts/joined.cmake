# llama.cpp in few large files; build_lib.py has cmake read this behind project("llama.cpp").
#
# llama.cpp has a small file for each model, and each of its files reads the same headers and makes
# the same code of the same templates. Joined they need half the time, and the functions of the
# libraries are the same: only files without equal names of static functions are joined.
#
# Cold files are compiled with -O1, which takes a third off. They run once for a model, or for an image,
# whose encoder takes thousands of times as long. What runs in a step is compiled as llama.cpp has it:
# loops over tokens, cells and candidates, and models that build graphs, where -O1 was seen to cost up to
# 10 % of a step that builds one. Hot files are linked first: where both have a function of one
# template, the linker takes that of the first.

# Compile *files* of *target*, relative to its folder, as one file, with *options* behind all others.
function(join target name options)
    get_target_property(folder ${target} SOURCE_DIR)
    list(TRANSFORM ARGN PREPEND "${folder}/" OUTPUT_VARIABLE files)
    foreach(file ${files})
        if(NOT EXISTS "${file}")
            message(FATAL_ERROR "llama.cpp has no ${file}: change scripts/joined.cmake")
        endif()
    endforeach()
    list(TRANSFORM files REPLACE "(.+)" "#include \"\\1\"\n" OUTPUT_VARIABLE lines)
    list(JOIN lines "" text)
    set(joined "${CMAKE_BINARY_DIR}/joined/${target}-${name}.cpp")
    file(WRITE "${joined}" "${text}")
    set_source_files_properties(${files} TARGET_DIRECTORY ${target} PROPERTIES HEADER_FILE_ONLY ON)
    set_source_files_properties("${joined}" TARGET_DIRECTORY ${target}
        PROPERTIES COMPILE_OPTIONS "${options}" SKIP_UNITY_BUILD_INCLUSION ON)
    target_sources(${target} PRIVATE "${joined}")
endfunction()

# Join the models of *target*, which build graphs, in files of *size*.
function(join_models target size options)
    get_target_property(files ${target} SOURCES)
    list(TRANSFORM files REPLACE "^.*/(models/[^/]+)$" "\\1")
    list(FILTER files INCLUDE REGEX "^models/.*\\.cpp$")
    list(LENGTH files n_left)
    set(number 1)
    while(n_left)
        list(SUBLIST files 0 ${size} some)
        join(${target} models-${number} "${options}" ${some})
        list(REMOVE_ITEM files ${some})
        list(LENGTH files n_left)
        math(EXPR number "${number} + 1")
    endwhile()
endfunction()

function(join_llama)
    if(NOT TARGET llama)
        return()
    endif()
    # A step: the batch, its graph and what goes into it, cells and candidates. The graph and the cells
    # of DeepSeek 4 both have a dsv4_plan_positions. Words stay apart: joined they gain nothing.
    join(llama step "" llama-hparams.cpp llama-context.cpp llama-graph.cpp llama-batch.cpp)
    join(llama cells "" llama-memory.cpp llama-kv-cache.cpp llama-kv-cache-iswa.cpp
        llama-kv-cache-dsa.cpp llama-kv-cache-dsa-iswa.cpp llama-kv-cache-msa.cpp
        llama-kv-cache-dsv4.cpp llama-memory-recurrent.cpp llama-memory-hybrid.cpp
        llama-memory-hybrid-iswa.cpp llama-memory-hybrid-idx.cpp)
    join(llama candidates "" llama-sampler.cpp llama-grammar.cpp)
    join_models(llama 40 "")
    # Once a model. The loader declares cases of its templates that the model uses, so it comes first.
    join(llama model -O1 llama-model-loader.cpp llama-model.cpp llama-model-saver.cpp)
    join(llama rest -O1 llama.cpp llama-adapter.cpp llama-arch.cpp llama-chat.cpp llama-cparams.cpp
        llama-impl.cpp llama-io.cpp llama-mmap.cpp llama-quant.cpp unicode-data.cpp)
endfunction()

# libmtmd's other files have static functions of one name, so they stay. Its helper opens files of
# images and sounds. We do that in Python, and call nothing of it but the choice of a log.
function(join_media)
    if(TARGET mtmd)
        get_target_property(folder mtmd SOURCE_DIR)
        set_source_files_properties("${folder}/mtmd-helper.cpp" "${folder}/mtmd-helper-gen.cpp"
            TARGET_DIRECTORY mtmd PROPERTIES COMPILE_OPTIONS -O0)
        join_models(mtmd 24 -O1)
    endif()
endfunction()
# Deferred, because the targets are made in folders that cmake enters later. Another version than the
# pinned one perhaps has other files in libllama (PLR_JOIN_MEDIA_ONLY).
if(NOT PLR_JOIN_MEDIA_ONLY)
    cmake_language(DEFER CALL join_llama)
endif()
cmake_language(DEFER CALL join_media)
