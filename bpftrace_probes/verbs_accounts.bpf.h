/* Maps of verbs.bpf.c, and the accounts kept in them: requests posted, requests completed. A part of that file, not a header of its own.
 */

struct created_qp {
	u64 send_cq;
	u64 sig_all;
};

/* nwv_thread.armed: which return is awaited. Kernels before 6.13 or so run the program of a return probe once for every probe of that
 * function, whichever process it was meant for: only the first run for an entry that was seen counts. */
#define ARMED_POST 1
#define ARMED_POLL 2
#define ARMED_EX_POLL 3

BPF_HASH(qps, struct nwv_qp_key, struct nwv_qp, NWV_MAX_QPS);
BPF_TABLE("lru_hash", u64, struct nwv_thread, threads, NWV_THREADS);
BPF_TABLE("lru_hash", u64, struct created_qp, created, NWV_THREADS);
BPF_HASH(cq_owner, u64, struct nwv_qp_key, NWV_MAX_QPS); /* the only queue pair of a completion queue; qp_num 0: it has several */
BPF_HASH(numbers, u64, u64, NWV_MAX_QPS); /* the context of a queue pair by process and number; 0: of several contexts */
BPF_ARRAY(config, struct nwv_config, 1);
BPF_PERCPU_ARRAY(counters, u64, NWV_COUNTERS);
BPF_PERCPU_ARRAY(blank, struct nwv_qp, 1); /* all zero: a new entry is too large for the stack */
BPF_RINGBUF_OUTPUT(control, 16);
BPF_PROG_ARRAY(steps, 1); /* on_completion */

/* A program can be preempted by another one on its CPU since kernel 6.0: hence the atomic addition. */
static inline void count(int which)
{
	u64 *value = counters.lookup(&which);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* An index into an array of a power of two: masked where neither clang nor the verifier of an older kernel can lose sight of it. */
static inline u64 masked(u64 index, const u64 mask)
{
	asm volatile("%0 &= %1" : "+r"(index) : "i"(mask));
	return index;
}

#define ADD(field, amount) __sync_fetch_and_add(&(field), (amount))

static inline u64 user_word(u64 address)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

static inline u32 user_int(u64 address)
{
	u32 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

static inline struct nwv_thread *this_thread(void)
{
	u64 id = bpf_get_current_pid_tgid();
	struct nwv_thread *thread = threads.lookup(&id);

	if (thread)
		return thread;
	struct nwv_thread fresh = {};

	threads.update(&id, &fresh);
	return threads.lookup(&id);
}

/* The account of a queue pair, made when it is new; its rings begin anew with each generation. */
static inline struct nwv_qp *account(struct nwv_qp_key *key, u64 now)
{
	int zero = 0;
	struct nwv_config *cfg = config.lookup(&zero);
	struct nwv_qp *qp = qps.lookup(key);

	if (!cfg || cfg->paused)
		return 0;
	if (!qp) {
		struct nwv_qp *empty = blank.lookup(&zero);

		if (!empty)
			return 0;
		qps.insert(key, empty);
		qp = qps.lookup(key);
		if (!qp) {
			count(NWV_COUNT_QPS_FULL);
			return 0;
		}
		qp->first_ns = now;
		qp->generation = cfg->generation;
	}
	if (qp->generation != cfg->generation) {
		qp->generation = cfg->generation;
		qp->head = qp->tail;
		qp->samples = 0;
	}
	return qp;
}

static inline u64 number_of(struct nwv_qp_key *key)
{
	return (u64)key->pid << 32 | key->qp_num;
}

/* Numbers are unique on a device. Where two devices of a process have one in common, a completion does not say whose it is. */
static inline void name_context(struct nwv_qp_key *key)
{
	u64 number = number_of(key), context = key->context;
	u64 *known = numbers.lookup(&number);

	if (!known)
		numbers.update(&number, &context);
	else if (*known != context)
		*known = 0;
}

/* By its number alone; 0 where nothing was posted to it while probes were there, or where the number does not tell. */
static inline u64 context_of(struct nwv_qp_key *key)
{
	u64 number = number_of(key);
	u64 *known = numbers.lookup(&number);

	if (known && !*known)
		count(NWV_COUNT_UNATTRIBUTED);
	return known ? *known : 0;
}

static inline struct nwv_qp *account_of(u64 address, struct nwv_qp_key *key, u64 now)
{
	key->context = user_word(address + QP_CONTEXT);
	key->qp_num = user_int(address + QP_NUM);
	key->pid = bpf_get_current_pid_tgid() >> 32;
	if (!key->context) {
		count(NWV_COUNT_UNREADABLE);
		return 0;
	}
	struct nwv_qp *qp = account(key, now);

	if (qp && qp->address != address) {
		qp->address = address;
		qp->send_cq = user_word(address + QP_SEND_CQ);
		qp->recv_cq = user_word(address + QP_RECV_CQ);
		name_context(key);
		struct nwv_qp_key *owner = cq_owner.lookup(&qp->send_cq);

		if (!owner)
			cq_owner.update(&qp->send_cq, key);
		else if (owner->qp_num != key->qp_num || owner->context != key->context || owner->pid != key->pid)
			owner->qp_num = 0;
	}
	return qp;
}

static inline void remember(struct nwv_qp *qp, u64 wr_id, u64 now)
{
	struct nwv_pending *slot = &qp->pending[masked(qp->tail, NWV_PENDING - 1)];

	if (qp->tail - qp->head >= NWV_PENDING) {
		qp->head++;
		ADD(qp->overwritten, 1);
	}
	slot->wr_id = wr_id;
	slot->time_ns = now;
	slot->posted = qp->posted;
	slot->bytes = qp->posted_bytes;
	qp->tail++;
}

static inline u64 request_bytes(struct send_wr *request)
{
	u64 bytes = 0;

	for (int i = 0; i < NWV_MAX_SGE; i++) {
		struct sge element = {};

		if (i >= request->num_sge)
			break;
		if (bpf_probe_read_user(&element, sizeof(element), (void *)(request->sg_list + i * sizeof(element))))
			break;
		bytes += element.length;
	}
	return bytes;
}

static inline void count_request(struct nwv_qp *qp, u32 opcode, u64 bytes, u32 flags)
{
	u64 slot = masked(opcode, NWV_OPCODES - 1);

	ADD(qp->posted, 1);
	ADD(qp->posted_bytes, bytes);
	ADD(qp->opcode_count[slot], 1);
	ADD(qp->opcode_bytes[slot], bytes);
	if (flags & SEND_INLINE)
		ADD(qp->inlined, 1);
	if ((flags & SEND_SIGNALED) || qp->sig_all)
		ADD(qp->signalled, 1);
}

/* Number of the highest bit set, without branches: each would double what the verifier has to look at in every loop around it. */
static inline u32 highest_bit(u64 value)
{
	value |= value >> 1;
	value |= value >> 2;
	value |= value >> 4;
	value |= value >> 8;
	value |= value >> 16;
	value |= value >> 32;
	value >>= 1;
	value -= (value >> 1) & 0x5555555555555555ULL;
	value = (value & 0x3333333333333333ULL) + ((value >> 2) & 0x3333333333333333ULL);
	value = (value + (value >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return (value * 0x0101010101010101ULL) >> 56;
}

/* Four buckets to an octave from 32 ns on; layouts.bucket_bounds is the inverse. */
static inline u32 bucket_of(u64 ns)
{
	if (ns < 32)
		ns = 32;
	if (ns >> 37)
		ns = (1ULL << 37) - 1;
	u32 octave = highest_bit(ns) & 63;

	return (octave - 5) * 4 + ((ns >> (octave - 2)) & 3);
}

/* Whether a completion belongs to a request of the send queue that we saw; if so that one and all before it are done. */
static inline int retire(struct nwv_qp *qp, u64 wr_id, u64 now)
{
	u64 head = qp->head, tail = qp->tail;

	for (int i = 0; i < NWV_SEARCH; i++) {
		if (head + i >= tail)
			return 0;
		struct nwv_pending *slot = &qp->pending[masked(head + i, NWV_PENDING - 1)];

		if (slot->wr_id != wr_id)
			continue;
		u64 bucket = masked(bucket_of(now - slot->time_ns), NWV_BUCKETS - 1);
		struct nwv_sample *sample = &qp->window[masked(qp->samples, NWV_WINDOW - 1)];

		ADD(qp->latency[bucket], 1);
		if (i)
			ADD(qp->skipped, i);
		qp->retired = slot->posted;
		qp->retired_bytes = slot->bytes;
		sample->time_ns = now;
		sample->bytes = slot->bytes;
		qp->samples++;
		qp->head = head + i + 1;
		return 1;
	}
	return 0;
}

/* One completion. opcode holds only for a successful one; else the wr_id tells the queue it belongs to. */
static inline void complete(struct nwv_qp *qp, u64 wr_id, u32 status, u32 opcode, u32 bytes, u64 now)
{
	ADD(qp->status_count[masked(status, NWV_STATUSES - 1)], 1);
	if (status)
		ADD(qp->errors, 1);
	if (!status && (opcode & WC_RECV)) {
		ADD(qp->received, 1);
		ADD(qp->received_bytes, bytes);
		return;
	}
	if (retire(qp, wr_id, now)) {
		ADD(qp->completed, 1);
		qp->last_completion_ns = now;
	} else if (status && qp->receives_posted > qp->received) {
		ADD(qp->received, 1);
	} else {
		ADD(qp->completed, 1);
		ADD(qp->unmatched, 1);
		qp->last_completion_ns = now;
	}
}
