#include "rendezvous.h"

#include <stdio.h>
#include <unistd.h>

#include "check.h"

namespace job {

ncclUniqueId exchange_id(const std::string& folder, const std::string& name, bool root) {
  const std::string path = folder + "/id." + name;
  ncclUniqueId id;
  if (root) {
    NCCL(ncclGetUniqueId(&id));
    const std::string temporary = path + ".new";
    FILE* file = fopen(temporary.c_str(), "w");
    if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) != 0 || rename(temporary.c_str(), path.c_str()) != 0) {
      fprintf(stderr, "testjob: cannot write %s\n", path.c_str());
      exit(1);
    }
    return id;
  }
  for (;;) {
    if (FILE* file = fopen(path.c_str(), "r")) {
      const size_t got = fread(&id, sizeof id, 1, file);
      fclose(file);
      if (got == 1) return id;
    }
    usleep(5000);
  }
}

void wait_for_file(const std::string& path) {
  constexpr useconds_t kPoll = 20'000;
  while (access(path.c_str(), F_OK) != 0) usleep(kPoll);
}

}  // namespace job
