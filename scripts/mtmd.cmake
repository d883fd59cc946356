# libmtmd's models in a few large files; build_lib.py has cmake read this behind project("llama.cpp").
#
# llama.cpp has a small file for each model that sees or hears, and each of the 45 reads the same
# headers: 94 of 547 CPU-seconds of a build. Joined by sixteen they take 13, and the functions of
# the library are the same. libmtmd's other files have static functions of one name, so they stay.
function(join_models_of_mtmd)
    if(NOT TARGET mtmd)
        return()
    endif()
    get_target_property(folder mtmd SOURCE_DIR)
    get_target_property(files mtmd SOURCES)
    list(FILTER files EXCLUDE REGEX "^models/")
    list(TRANSFORM files PREPEND "${folder}/")
    set_source_files_properties(${files} TARGET_DIRECTORY mtmd
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endfunction()
# Deferred, because the target is made in a folder that cmake enters later.
cmake_language(DEFER CALL join_models_of_mtmd)
