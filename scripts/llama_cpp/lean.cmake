# Included by llama-cpp-python's own CMakeLists.txt: builds what Rekindle uses of llama.cpp.
# Kernels (ggml) keep every optimisation; measured in docs/decisions/0018-lean-build.md.

# Patches of llama.cpp: docs/decisions/0055-patches-of-llama-cpp.md. pip builds in a copy of the sources,
# which it deletes afterwards, so they are changed in place. Only without `patch` they stay as they are.
find_program(PATCH_PROGRAM patch)
foreach(name amx attention cells hopper)
  set(apply "${PATCH_PROGRAM}" -p1 --batch --input "${CMAKE_CURRENT_LIST_DIR}/${name}.patch")
  set(where WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")
  if(NOT PATCH_PROGRAM)
    message(WARNING "Rekindle's ${name}.patch was not applied: there is no `patch`.")
    continue()
  endif()
  execute_process(COMMAND ${apply} --reverse --force --dry-run ${where}
                  RESULT_VARIABLE missing OUTPUT_QUIET ERROR_QUIET)
  if(missing) # not applied by an earlier run in this folder
    execute_process(COMMAND ${apply} --forward ${where} COMMAND_ERROR_IS_FATAL ANY)
  endif()
endforeach()

# Command-line helpers and their HTTP client. llama-cpp-python forces this option into the
# cache; a plain variable shadows it.
set(LLAMA_BUILD_COMMON OFF)

function(rekindle_lean_targets)
  if(TARGET vendor-hash) # for the helpers only
    set_target_properties(vendor-hash PROPERTIES EXCLUDE_FROM_ALL TRUE)
  endif()
  if(MSVC OR NOT CMAKE_BUILD_TYPE STREQUAL "Release")
    return()
  endif()
  # Most of libllama runs once per model or once per graph and compiles slowly at -O3.
  # What runs for every token keeps it.
  target_compile_options(llama PRIVATE -O1)
  foreach(name batch context graph kv-cache kv-cache-iswa memory-hybrid memory-recurrent sampler vocab)
    list(APPEND hot vendor/llama.cpp/src/llama-${name}.cpp)
  endforeach()
  list(APPEND hot vendor/llama.cpp/src/unicode.cpp)
  set_property(SOURCE ${hot} TARGET_DIRECTORY llama APPEND PROPERTY COMPILE_OPTIONS -O3)
endfunction()
cmake_language(DEFER CALL rekindle_lean_targets)
