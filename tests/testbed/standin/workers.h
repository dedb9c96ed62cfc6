// Threads that run what a GPU runs at the same time: the thread blocks of a kernel, and the transfers inside one. Each task may block
// on another, so every task has a thread; finished threads wait for the next kernel.
#pragma once

#include <functional>
#include <vector>

namespace standin {

// Runs all tasks at once and returns when all have ended. The caller's thread runs one of them.
void run_together(std::vector<std::function<void()>> tasks);

}  // namespace standin
