/* SPDX-License-Identifier: Apache-2.0 */
/* The trace file alone: what is written is read, and whatever else is in a file costs only itself.
 */
#include "engine/hardware.h"
#include "engine/trace_write.h"
#include "tests/trace_check.h"

const char moe_suite_name[] = "trace_file";

static uint64_t state;

static uint64_t any(void)
{
	return trace_random(&state);
}

/* ---- numbers ---- */

static void numbers(void)
{
	static const int64_t edges[] = { 0,
					 1,
					 -1,
					 63,
					 -64,
					 64,
					 INT32_MAX,
					 INT32_MIN,
					 INT64_MAX,
					 INT64_MIN,
					 INT64_MIN + 1,
					 127,
					 128,
					 (int64_t)1 << 62 };
	uint8_t buf[MOE_MXT_VARINT_BYTES];
	uint64_t v;

	state = moe_test_seed();
	CHECK(moe_mxt_crc(0, "123456789", 9) == 0xe3069283u);
	CHECK(moe_mxt_crc(moe_mxt_crc(0, "1234", 4), "56789", 5) == 0xe3069283u);
	for (size_t i = 0; i < 2000; i++) {
		int64_t x = i < sizeof edges / sizeof *edges ? edges[i]
							     : (int64_t)(any() >> any() % 64);
		size_t n = moe_mxt_put(buf, moe_mxt_zigzag(x));

		CHECK(n >= 1 && n <= MOE_MXT_VARINT_BYTES);
		CHECK(moe_mxt_get(buf, n, &v) == n && moe_mxt_unzigzag(v) == x);
		CHECK(moe_mxt_get(buf, n - 1, &v) == 0);
	}
	memset(buf, 0xff, sizeof buf);
	CHECK(moe_mxt_get(buf, sizeof buf, &v) == 0);
}

static void heads(void)
{
	struct moe_mxt_head h = { MOE_MXT_TASKS,     3,	       99,	 0xdeadbeef,
				  { -5, INT64_MAX }, { 1, 2 }, { 7, 9 }, { INT64_MAX, INT64_MIN } },
			    back;
	uint8_t raw[MOE_MXT_HEAD_BYTES];

	moe_mxt_head_encode(&h, raw);
	CHECK(moe_mxt_head_decode(raw, &back) && !memcmp(&h, &back, sizeof h));
	for (size_t bit = 0; bit < 8 * sizeof raw; bit++) {
		raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
		CHECK(!moe_mxt_head_decode(raw, &back));
		raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
	}
	h.length = MOE_MXT_MAX_PAYLOAD + 1;
	moe_mxt_head_encode(&h, raw);
	CHECK(!moe_mxt_head_decode(raw, &back));
}

/* ---- tables ---- */

/* A chunk of its type with odd values; lists as their counts say. */
static void fill(struct moe_mxt_table *t, enum moe_mxt_chunk type, int rows)
{
	int columns = type == MOE_MXT_TASKS ? MOE_MXT_TASK_LLC_MISSES : 5;
	int list = type == MOE_MXT_DEPS	     ? MOE_MXT_DEP_BACK
		   : type == MOE_MXT_ROUTING ? MOE_MXT_ROUTING_LOADS
					     : 0;
	bool names = type == MOE_MXT_MEMORY || type == MOE_MXT_COUNTERS || type == MOE_MXT_END;

	moe_mxt_table_init(t, type);
	if (names)
		moe_mxt_add_text(t, 1, "weights"), moe_mxt_add_text(t, 1, "");
	for (int r = 0; r < rows; r++) {
		for (int c = names ? 2 : 1; c <= columns; c++)
			moe_mxt_add(t, c,
				    c % 4 == 0	 ? 7
				    : c % 4 == 1 ? (int64_t)1000000 * r + (int64_t)(any() % 1000)
				    : c % 4 == 2 ? (int64_t)any()
				    : any() % 3	 ? r
						 : MOE_MXT_NA);
		if (list) {
			int n = (int)(any() % 5);

			moe_mxt_add(t, list - 1, n);
			for (int i = 0; i < n; i++)
				moe_mxt_add(t, list, (int64_t)(any() % 100));
		}
		moe_mxt_row(t, 10 * r, 10 * r + 5, r ? r : MOE_MXT_NA, r % 3, r % 2 ? r : -1);
	}
}

static bool same(const struct moe_mxt_table *a, const struct moe_mxt_table *b)
{
	for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++)
		if (a->column[c].n != b->column[c].n ||
		    (a->column[c].n && memcmp(a->column[c].value, b->column[c].value,
					      a->column[c].n * sizeof(int64_t))))
			return false;
	return true;
}

#define CHUNKS (MOE_MXT_END - MOE_MXT_TASKS + 1)

/* Every type once; the tables stay with the caller. */
static void write_all(const char *path, struct moe_mxt_table *t, int rows)
{
	struct moe_mxt_writer w;

	CHECK(moe_mxt_create(&w, path));
	CHECK(moe_mxt_write_header(&w, "a=1\nlong.key=with = and spaces\nempty=\n"));
	for (int i = 0; i < CHUNKS; i++) {
		struct moe_mxt_table copy;

		fill(&t[i], (enum moe_mxt_chunk)(MOE_MXT_TASKS + i), rows);
		moe_mxt_table_init(&copy, (enum moe_mxt_chunk)(MOE_MXT_TASKS + i));
		for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++)
			for (size_t k = 0; k < t[i].column[c].n; k++)
				moe_mxt_add(&copy, c, t[i].column[c].value[k]);
		copy.head = t[i].head;
		CHECK(moe_mxt_write(&w, &copy) && copy.head.rows == 0);
		moe_mxt_table_free(&copy);
	}
	CHECK(moe_mxt_finish(&w));
}

static void round_trip(void)
{
	static const int sizes[] = { 1, 2, 100, 5000 };

	state = moe_test_seed();
	for (size_t s = 0; s < 4; s++) {
		struct moe_mxt_table t[CHUNKS], got;
		struct moe_mxt_reader r;
		char buf[40];
		const char *path = trace_file("all.mxt");

		write_all(path, t, sizes[s]);
		CHECK(moe_mxt_open(&r, path));
		CHECK(r.n == CHUNKS && r.ended && r.lost_bytes == 0);
		CHECK(moe_mxt_number(&r, "a", -1) == 1 && moe_mxt_number(&r, "empty", -1) == -1);
		CHECK(!strcmp(moe_mxt_value(&r, "long.key", buf, sizeof buf), "with = and spaces"));
		CHECK(!moe_mxt_value(&r, "long", buf, sizeof buf));
		moe_mxt_table_init(&got, MOE_MXT_TASKS);
		for (size_t i = 0; i < r.n; i++) {
			CHECK(moe_mxt_load(&r, i, &got));
			CHECK(same(&got, &t[i]));
			CHECK(got.head.type == t[i].head.type && got.head.rows == t[i].head.rows);
			CHECK(!memcmp(got.head.time, t[i].head.time, sizeof got.head.time));
			CHECK(!memcmp(got.head.layer, t[i].head.layer, sizeof got.head.layer));
			CHECK(got.head.time[0] == 0 && got.head.time[1] == 10 * (sizes[s] - 1) + 5);
			moe_mxt_table_free(&t[i]);
		}
		moe_mxt_table_free(&got);
		moe_mxt_close(&r);
	}
}

/* A reader of today with a file of tomorrow. */
static void unknown_columns(void)
{
	struct moe_mxt_table t, got;
	struct moe_mxt_writer w;
	struct moe_mxt_reader r;
	const char *path = trace_file("new.mxt");

	moe_mxt_table_init(&t, (enum moe_mxt_chunk)200);
	moe_mxt_add(&t, 1, 5);
	moe_mxt_row(&t, 0, 0, MOE_MXT_NA, MOE_MXT_NA, -1);
	CHECK(moe_mxt_create(&w, path) && moe_mxt_write_header(&w, "") && moe_mxt_write(&w, &t));
	CHECK(moe_mxt_finish(&w));
	CHECK(moe_mxt_open(&r, path) && r.n == 1 && r.chunk[0].head.type == 200 && !r.ended);
	moe_mxt_table_init(&got, MOE_MXT_TASKS);
	CHECK(moe_mxt_load(&r, 0, &got) && moe_mxt_at(&got, 1, 0) == 5);
	CHECK(moe_mxt_at(&got, 2, 0) == MOE_MXT_NA && moe_mxt_at(&got, 1, 1) == MOE_MXT_NA);
	/* id 70, constant, 1 value, 1 byte */
	CHECK(!moe_mxt_unpack(&got, (const uint8_t *)"\x46\x01\x01\x01\x02\x03\x01\x01\x01\x04",
			      10));
	CHECK(got.column[3].n == 1 && got.column[3].value[0] == 2 && !got.column[1].n);
	moe_mxt_table_free(&got);
	moe_mxt_table_free(&t);
	moe_mxt_close(&r);
}

/* ---- damage ---- */

/* Chunks that can be loaded are whole: equal to what was written. */
static size_t intact(const char *path, const struct moe_mxt_table *t, size_t *heads_left)
{
	struct moe_mxt_reader r;
	struct moe_mxt_table got;
	size_t good = 0;

	*heads_left = 0;
	if (!moe_mxt_open(&r, path)) {
		CHECK(r.error[0] && r.fd < 0);
		return 0;
	}
	*heads_left = r.n;
	moe_mxt_table_init(&got, MOE_MXT_TASKS);
	for (size_t i = 0; i < r.n; i++) {
		if (!moe_mxt_load(&r, i, &got)) {
			CHECK(r.error[0]);
			continue;
		}
		good++;
		CHECK(same(&got, &t[r.chunk[i].head.type - MOE_MXT_TASKS]));
	}
	moe_mxt_table_free(&got);
	moe_mxt_close(&r);
	return good;
}

static void damage(void)
{
	struct moe_mxt_table t[CHUNKS];
	char whole[4200], bad[4200];
	size_t n, left, last = 0;
	uint8_t *data;

	state = moe_test_seed();
	snprintf(whole, sizeof whole, "%s", trace_file("whole.mxt"));
	snprintf(bad, sizeof bad, "%s", trace_file("bad.mxt"));
	write_all(whole, t, 4);
	data = trace_contents(whole, &n);
	for (size_t cut = 0; cut <= n; cut++) { /* a crash leaves a prefix: chunks only come */
		size_t good;

		trace_put(bad, data, cut);
		good = intact(bad, t, &left);
		CHECK(good >= last && left == good);
		last = good;
	}
	CHECK(last == CHUNKS);
	for (size_t at = MOE_MXT_FILE_BYTES; at < n;
	     at++) { /* one byte costs one chunk, or the header */
		data[at] ^= (uint8_t)(1 + any() % 255);
		trace_put(bad, data, n);
		CHECK(intact(bad, t, &left) >= CHUNKS - 1);
		free(data);
		data = trace_contents(whole, &n);
	}
	for (int i = 0; i < 300; i++) { /* a hole, or a piece twice */
		size_t a = any() % n, b = a + any() % (n - a);

		memset(data + a, (int)any(), b - a);
		trace_put(bad, data, i % 2 ? n : b);
		intact(bad, t, &left);
		free(data);
		data = trace_contents(whole, &n);
	}
	free(data);
	for (int i = 0; i < CHUNKS; i++)
		moe_mxt_table_free(&t[i]);
}

/* Payloads that nobody wrote, with a checksum that is right. */
static void hostile(void)
{
	static const struct {
		const char *payload;
		size_t n;
		const char *text;
	} cases[] = {
		{ "\x01", 1, "cut off" },
		{ "\x01\x01\x01\x05\x02", 5, "cut off" },
		{ "\x01\x09\x01\x01\x02", 5, "encoding" },
		{ "\x01\x01\xff\xff\xff\xff\x0f\x01\x02", 9, "impossibly many" },
		{ "\x01\x02\xff\xff\xff\xff\x0f\x01\x02", 9, "impossibly many" },
		{ "\x01\x04\x02\x01\x02", 5, "impossibly many" },
		{ "\x01\x01\x00\x01\x02", 5, "impossibly many" },
		{ "\x01\x01\x01\x01\x02\x01\x01\x01\x01\x02", 10, "twice" },
		{ "\x01\x01\x01\x02\x02\x02", 6, "longer" },
		{ "\x01\x02\x01\x01\x80", 5, "a value is cut off" },
	};
	struct moe_mxt_table t;
	uint8_t random[64];
	const char *wrong;

	moe_mxt_table_init(&t, MOE_MXT_TASKS);
	t.head.rows = 1;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		wrong = moe_mxt_unpack(&t, (const uint8_t *)cases[i].payload, cases[i].n);
		CHECK(wrong && strstr(wrong, cases[i].text));
	}
	state = moe_test_seed();
	for (int i = 0; i < (moe_test_full() ? 2000000 : 50000); i++) {
		size_t n = any() % sizeof random;

		for (size_t k = 0; k < n; k++)
			random[k] = (uint8_t)(any() % 4 ? any() % 8 : any());
		moe_mxt_unpack(&t, random, n);
	}
	moe_mxt_table_free(&t);
}

static void lists(void)
{
	struct moe_mxt_table t, got;
	struct moe_mxt_writer w;
	struct moe_mxt_reader r;
	const char *path = trace_file("lists.mxt");

	CHECK(moe_mxt_create(&w, path) && moe_mxt_write_header(&w, ""));
	for (int count = -1; count <= 3; count++) { /* says `count`, has 2 */
		moe_mxt_table_init(&t, MOE_MXT_DEPS);
		moe_mxt_add(&t, MOE_MXT_DEP_COUNT, count);
		moe_mxt_add(&t, MOE_MXT_DEP_BACK, 1), moe_mxt_add(&t, MOE_MXT_DEP_BACK, 2);
		moe_mxt_row(&t, 0, 0, 1, 1, -1);
		CHECK(moe_mxt_write(&w, &t));
		moe_mxt_table_free(&t);
	}
	CHECK(moe_mxt_finish(&w) && moe_mxt_open(&r, path) && r.n == 5);
	moe_mxt_table_init(&got, MOE_MXT_DEPS);
	for (size_t i = 0; i < 5; i++) {
		CHECK(moe_mxt_load(&r, i, &got) == (i == 3));
		CHECK(i == 3 || strstr(r.error, "counts"));
	}
	moe_mxt_table_free(&got);
	moe_mxt_close(&r);
}

static void refused(void)
{
	struct moe_mxt_reader r;
	struct moe_mxt_writer w;
	const char *path = trace_file("other");

	CHECK(!moe_mxt_open(&r, trace_file("none/x.mxt")) && strstr(r.error, "No such file"));
	CHECK(!moe_mxt_open(&r, moe_test_dir()) && r.error[0]);
	CHECK(!moe_mxt_open(&r, "/dev/zero") && strstr(r.error, "regular"));
	trace_put(path, (const uint8_t *)"{\"traceEvents\": [1, 2, 3]}", 26);
	CHECK(!moe_mxt_open(&r, path) && strstr(r.error, "not a trace"));
	trace_put(path, (const uint8_t *)MOE_MXT_MARK "\x02\0\0\0\0\0\0\0", 16);
	CHECK(!moe_mxt_open(&r, path) && strstr(r.error, "version 2"));
	CHECK(!moe_mxt_create(&w, trace_file("none/x.mxt")) && strstr(w.error, "No such file"));
	CHECK(!moe_mxt_create(&w, "/dev/full") && strstr(w.error, "space"));
}

/* ---- the processor's counters ---- */

static void hardware(void)
{
	struct moe_hardware h = { .tried = false };
	int64_t v[MOE_HARDWARE_COUNTERS];
	const char *error = moe_hardware_open(&h, true);

	if (error) {
		printf("  (no perf_event here: %s) ", error);
		moe_hardware_read(&h, v);
		for (int i = 0; i < MOE_HARDWARE_COUNTERS; i++)
			CHECK(v[i] == INT64_MIN); /* not known is not 0 */
	} else {
		moe_hardware_read(&h, h.begin);
		for (volatile int i = 0; i < 1000000; i++)
			;
		moe_hardware_since(&h, v);
		CHECK(h.n == MOE_HARDWARE_COUNTERS && v[0] > 100000 &&
		      v[0] < 60 * (int64_t)1000000000);
	}
	moe_hardware_close(&h);
	CHECK(!strcmp(moe_hardware_name(0), "cycles") && !moe_hardware_name(MOE_HARDWARE_COUNTERS));
}

const struct moe_test moe_suite_tests[] = {
	{ "numbers", numbers },
	{ "heads", heads },
	{ "round trip of every chunk", round_trip },
	{ "chunks and columns of tomorrow", unknown_columns },
	{ "damaged and cut off files", damage },
	{ "hostile payloads", hostile },
	{ "lists", lists },
	{ "other files", refused },
	{ "counters of the processor", hardware },
	{ NULL, NULL },
};
