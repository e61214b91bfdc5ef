# Included by llama-cpp-python's own CMakeLists.txt: builds what Rekindle uses of llama.cpp.
# Kernels (ggml) keep every optimisation; measured in docs/decisions/0018-lean-build.md.

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
