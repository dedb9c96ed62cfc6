// libnccl links the CUDA runtime statically. When it is loaded, every cuda* function found by name in its .symtab is redirected, in
// this process's memory only, to the function of the same name in this library; a name without a counterpart goes to a stub that
// reports the call as unsupported. NCCL's own functions and the file on disk are not touched.
#include "redirect.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "jumps.h"
#include "log.h"
#include "nccl_layout.h"

namespace standin {

namespace {

std::mutex g_redirect_mutex;
std::map<uintptr_t, std::string>& kernels() {
  static auto* map = new std::map<uintptr_t, std::string>;
  return *map;
}

uintptr_t g_proxy_begin = 0, g_proxy_end = 0;

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "[testbed %d] %s\n", getpid(), why.c_str());
  _exit(85);
}

std::string hex(const unsigned char* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; i++) {
    char two[3];
    snprintf(two, sizeof two, "%02x", bytes[i]);
    text += two;
  }
  return text;
}

cudaError_t call_unsupported(const char* name) {
  refuse(name);
  return cudaErrorNotSupported;
}

// Stubs for CUDA functions without counterpart: each calls call_unsupported with its name.
class Stubs {
 public:
  const void* add(const char* name) {
    if (used_ + kStubSize > kPoolSize) fail("too many unsupported CUDA functions");
    if (!pool_) {
      void* memory = mmap(nullptr, kPoolSize, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) fail("no memory for stubs");
      pool_ = static_cast<unsigned char*>(memory);
    }
    unsigned char* stub = pool_ + used_;
    used_ += kStubSize;
    write_call(stub, strdup(name), reinterpret_cast<const void*>(call_unsupported));
    return stub;
  }

 private:
  static constexpr size_t kPoolSize = 64 << 10;
  unsigned char* pool_ = nullptr;
  size_t used_ = 0;
};

// Read-only view of a file.
class FileView {
 public:
  explicit FileView(const char* path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) fail(std::string("cannot read ") + path);
    size_ = status.st_size;
    data_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0));
    close(fd);
    if (data_ == MAP_FAILED) fail(std::string("cannot map ") + path);
  }
  ~FileView() { munmap(data_, size_); }
  FileView(const FileView&) = delete;
  FileView& operator=(const FileView&) = delete;
  template <class T>
  const T* at(size_t offset) const {
    return reinterpret_cast<const T*>(data_ + offset);
  }

 private:
  char* data_;
  size_t size_;
};

void* own_handle() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&own_handle), &info)) fail("the stand-in cannot find itself");
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

void check_build(const FileView& file, const Elf64_Shdr* sections, unsigned count, const char* path) {
  for (unsigned i = 0; i < count; i++) {
    if (sections[i].sh_type != SHT_NOTE) continue;
    const auto* note = file.at<Elf64_Nhdr>(sections[i].sh_offset);
    if (note->n_type != NT_GNU_BUILD_ID || note->n_namesz != 4) continue;
    const std::string found = hex(reinterpret_cast<const unsigned char*>(note) + sizeof *note + 4, note->n_descsz);
    if (kBuiltForBuildId[0] && found != kBuiltForBuildId)
      fail(std::string("this stand-in was built for the libnccl with build id ") + kBuiltForBuildId + ", but " + path + " has " + found +
           "; build the testbed for that version");
    return;
  }
}

bool is_kernel(const char* name) {
  return (strstr(name, "ncclDevKernel_") || strstr(name, "oneRankReduce")) && !strstr(name, "__device_stub");
}

void redirect_library(const char* path, uintptr_t base) {
  static std::set<uintptr_t> done;
  if (!done.insert(base).second) return;
  const FileView file(path);
  const auto* header = file.at<Elf64_Ehdr>(0);
  const auto* sections = file.at<Elf64_Shdr>(header->e_shoff);
  check_build(file, sections, header->e_shnum, path);
  void* self = own_handle();
  static Stubs stubs;
  std::vector<std::pair<uintptr_t, const void*>> jumps;
  unsigned implemented = 0;
  for (unsigned i = 0; i < header->e_shnum; i++) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = file.at<Elf64_Sym>(sections[i].sh_offset);
    const char* names = file.at<char>(sections[sections[i].sh_link].sh_offset);
    for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++) {
      const Elf64_Sym& symbol = symbols[k];
      const char* name = names + symbol.st_name;
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !symbol.st_value) continue;
      if (strcmp(name, "_Z17ncclProxyProgressPv") == 0) {
        g_proxy_begin = base + symbol.st_value;
        g_proxy_end = g_proxy_begin + symbol.st_size;
      }
      if (is_kernel(name)) kernels()[base + symbol.st_value] = name;
      if (strncmp(name, "cuda", 4) != 0 || name[4] < 'A' || name[4] > 'Z') continue;
      const void* target = dlsym(self, name);
      implemented += target != nullptr;
      if (symbol.st_size < kJumpSize) {
        if (target) fail(std::string(name) + " in libnccl is too short to redirect");
        continue;
      }
      jumps.emplace_back(base + symbol.st_value, target ? target : stubs.add(name));
    }
  }
  if (!g_proxy_begin) fail(std::string(path) + " has no ncclProxyProgress: an NCCL this testbed does not know");
  if (jumps.empty()) fail(std::string(path) + " has no cuda* functions in its .symtab: stripped, or linked to a shared CUDA runtime");
  const auto [first, last] = std::minmax_element(jumps.begin(), jumps.end());
  const uintptr_t start = first->first & ~uintptr_t{4095};
  const size_t length = last->first + kJumpSize - start;
  void* text = reinterpret_cast<void*>(start);
  if (mprotect(text, length, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) fail("cannot make libnccl's CUDA runtime writable");
  for (const auto& [at, target] : jumps) write_jump(reinterpret_cast<unsigned char*>(at), target);
  mprotect(text, length, PROT_READ | PROT_EXEC);
  __builtin___clear_cache(static_cast<char*>(text), static_cast<char*>(text) + length);
  log(1, "redirected %zu CUDA functions of %s, %u of them implemented", jumps.size(), path, implemented);
}

// By the file's own name: folders may well be called after NCCL too.
bool is_nccl(const char* path) {
  if (!path) return false;
  const char* slash = strrchr(path, '/');
  return strncmp(slash ? slash + 1 : path, "libnccl.so", 10) == 0;
}

int visit(dl_phdr_info* info, size_t, void*) {
  if (is_nccl(info->dlpi_name)) redirect_library(info->dlpi_name, info->dlpi_addr);
  return 0;
}

[[gnu::constructor]] void redirect_loaded() {
  std::lock_guard<std::mutex> lock(g_redirect_mutex);
  dl_iterate_phdr(visit, nullptr);
}

}  // namespace

std::string kernel_name(const void* stub) {
  std::lock_guard<std::mutex> lock(g_redirect_mutex);
  auto found = kernels().find(reinterpret_cast<uintptr_t>(stub));
  return found == kernels().end() ? std::string() : found->second;
}

bool in_proxy_progress(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= g_proxy_begin && at < g_proxy_end;
}

}  // namespace standin

// Programs that load NCCL by dlopen (the stand-in preloaded) are redirected as soon as it is there.
extern "C" void* dlopen(const char* file, int flags) {
  using Dlopen = void* (*)(const char*, int);
  static const auto next = reinterpret_cast<Dlopen>(dlsym(RTLD_NEXT, "dlopen"));
  void* handle = next(file, flags);
  if (handle && standin::is_nccl(file)) standin::redirect_loaded();
  return handle;
}
