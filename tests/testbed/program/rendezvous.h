// How ranks give each other NCCL unique ids: files in a folder all of them see.
#pragma once

#include <nccl.h>

#include <string>

namespace job {

// The id of the communicator of that name: made and published by the rank that is root, awaited by the others.
ncclUniqueId exchange_id(const std::string& folder, const std::string& name, bool root);

// Returns once there is a file of that name.
void wait_for_file(const std::string& path);

}  // namespace job
