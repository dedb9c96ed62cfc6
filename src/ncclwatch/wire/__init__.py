"""The wire plane: RDMA work requests of a live process, accounted for in the kernel per queue pair.

Resolution (:mod:`contexts`, :mod:`sites`), programs and their maps (:mod:`kernel`, :mod:`layouts`), what the accounts say
(:mod:`accounts`, :mod:`watch`), what it may cost (:mod:`governor`), and flows joined with NCCL's channels (:mod:`flows`).
"""
