/* libibverbs' public, frozen binary interface (infiniband/verbs.h, IBVERBS_1.1, x86-64), as far as the programs of verbs.bpf.c read it.
 *
 * The same numbers are in src/ncclwatch/wire/abi.py; tests/unit/test_wire_abi.py checks both against the installed header.
 */
#ifndef NCCLWATCH_VERBS_ABI_H
#define NCCLWATCH_VERBS_ABI_H

#define QP_CONTEXT 0
#define QP_SEND_CQ 24
#define QP_RECV_CQ 32
#define QP_NUM 52
#define CQ_CONTEXT 0
#define CQ_EX_STATUS 132
#define CQ_EX_WR_ID 136
#define QP_EX_WR_ID 168
#define QP_EX_WR_FLAGS 176
#define SEND_SIGNALED 2
#define SEND_INLINE 8
#define WC_RECV 128
#define PD_CONTEXT 0
#define INIT_ATTR_SEND_CQ 8
#define INIT_ATTR_SIG_ALL 56
#define ATTR_STATE_MASK 1

struct send_wr {
	u64 wr_id;
	u64 next;
	u64 sg_list;
	s32 num_sge;
	u32 opcode;
	u32 flags;
};

struct recv_wr {
	u64 wr_id;
	u64 next;
};

struct sge {
	u64 address;
	u32 length;
	u32 lkey;
};

struct work_completion {
	u64 wr_id;
	u32 status;
	u32 opcode;
	u32 vendor_error;
	u32 bytes;
	u32 immediate;
	u32 qp_num;
};

#endif
