/* x86-64 has pages of 4 KiB; BCC sizes its ring buffers in pages. */
#pragma once
#define PAGE_SIZE 4096UL
