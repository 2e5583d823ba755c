#include "buffer.h"

namespace fedmpq {

void* memory_of(size_t bytes, Few& few) {
  if (bytes >= Few::bytes) return std::aligned_alloc(cache_line, (bytes / cache_line + 1) * cache_line);
  return few.room + (cache_line - reinterpret_cast<uintptr_t>(few.room) % cache_line) % cache_line;
}

void release(void* memory, const Few& few) {
  const auto own = reinterpret_cast<uintptr_t>(few.room), at = reinterpret_cast<uintptr_t>(memory);
  if (at < own || at >= own + sizeof few.room) std::free(memory);
}

}  // namespace fedmpq
