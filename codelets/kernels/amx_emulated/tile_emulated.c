/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/amx/tile.h"

#define TILES 8
#define WORDS (AMX_ROW_BYTES / 4)

struct tile {
	int rows, row_bytes; /* rows 0: not configured */
	uint8_t data[AMX_ROWS][AMX_ROW_BYTES];
};

static _Thread_local struct tile tiles[TILES];
static _Thread_local bool loaded;

static struct tile *configured(int tile)
{
	MOE_ASSERT(loaded && tile >= 0 && tile < TILES);
	MOE_ASSERT(tiles[tile].rows > 0);
	return &tiles[tile];
}

void amx_load_config(const struct amx_config *config)
{
	MOE_ASSERT(!loaded); /* whoever was here before has released */
	MOE_ASSERT((uintptr_t)config % 64 == 0);
	MOE_ASSERT(config->palette == 1 && config->start_row == 0);
	for (size_t i = 0; i < MOE_COUNT(config->reserved); i++)
		MOE_ASSERT(config->reserved[i] == 0);
	memset(tiles, 0, sizeof tiles);
	for (int i = 0; i < 16; i++) {
		int rows = config->rows[i], row_bytes = config->row_bytes[i];

		MOE_ASSERT((rows == 0) == (row_bytes == 0));
		MOE_ASSERT(rows <= AMX_ROWS && row_bytes <= AMX_ROW_BYTES && row_bytes % 4 == 0);
		MOE_ASSERT(i < TILES || rows == 0);
		if (i < TILES) {
			tiles[i].rows = rows;
			tiles[i].row_bytes = row_bytes;
		}
	}
	loaded = true;
}

void amx_release(void)
{
	MOE_ASSERT(loaded);
	loaded = false;
}

void amx_zero(int tile)
{
	memset(configured(tile)->data, 0, sizeof tiles->data);
}

void amx_load(int tile, const void *from, int64_t stride)
{
	struct tile *t = configured(tile);

	MOE_ASSERT(t->rows == 1 || stride >= t->row_bytes);
	memset(t->data, 0, sizeof t->data);
	for (int i = 0; i < t->rows; i++)
		memcpy(t->data[i], (const char *)from + i * stride, (size_t)t->row_bytes);
}

void amx_store(int tile, void *to, int64_t stride)
{
	struct tile *t = configured(tile);

	MOE_ASSERT(t->rows == 1 || stride >= t->row_bytes);
	for (int i = 0; i < t->rows; i++)
		memcpy((char *)to + i * stride, t->data[i], (size_t)t->row_bytes);
}

static void check_shapes(const struct tile *c, const struct tile *a, const struct tile *b)
{
	MOE_ASSERT(c != a && c != b && a != b);
	MOE_ASSERT(c->rows == a->rows);
	MOE_ASSERT(c->row_bytes == b->row_bytes);
	MOE_ASSERT(a->row_bytes / 4 == b->rows);
}

/* A row in vectors that every x86-64 has: what the compiler makes of loops over arrays here takes five times as long. */
typedef float quad __attribute__((vector_size(16)));
typedef uint32_t bits __attribute__((vector_size(16)));
#define QUADS (WORDS / 4)

/* Row i of a tile as f32: the even elements, then the odd ones. */
static void widen(const struct tile *t, int i, quad even[QUADS], quad odd[QUADS])
{
	bits words[QUADS];

	memcpy(words, t->data[i], sizeof words);
	for (int q = 0; q < QUADS; q++) {
		even[q] = (quad)(words[q] << 16);
		odd[q] = (quad)(words[q] & 0xffff0000u);
	}
}

/* TDPBF16PS: the even products and the odd ones are summed apart, from zero, over the whole tile;
 * then both together are added to c. */
void amx_dp_bf16(int c, int a, int b)
{
	struct tile *to = configured(c);
	const struct tile *ta = configured(a), *tb = configured(b);
	quad b_even[AMX_ROWS][QUADS], b_odd[AMX_ROWS][QUADS];

	check_shapes(to, ta, tb);
	for (int k = 0; k < tb->rows; k++)
		widen(tb, k, b_even[k], b_odd[k]);
	for (int i = 0; i < to->rows; i++) {
		quad a_even[QUADS], a_odd[QUADS], even[QUADS] = { 0 }, odd[QUADS] = { 0 }, sum[QUADS];

		widen(ta, i, a_even, a_odd);
		for (int k = 0; k < tb->rows; k++)
			for (int q = 0; q < QUADS; q++) {
				even[q] += a_even[k / 4][k % 4] * b_even[k][q];
				odd[q] += a_odd[k / 4][k % 4] * b_odd[k][q];
			}
		memcpy(sum, to->data[i], sizeof sum);
		for (int q = 0; q < QUADS; q++)
			sum[q] += even[q] + odd[q];
		memcpy(to->data[i], sum, (size_t)to->row_bytes);
	}
}

/* TDPBSSD; sums wrap around as the CPU's do. */
void amx_dp_s8(int c, int a, int b)
{
	struct tile *to = configured(c);
	const struct tile *ta = configured(a), *tb = configured(b);

	check_shapes(to, ta, tb);
	for (int i = 0; i < to->rows; i++) {
		uint32_t sum[WORDS];

		memcpy(sum, to->data[i], sizeof sum);
		for (int k = 0; k < tb->rows; k++)
			for (int j = 0; j < to->row_bytes; j++)
				sum[j / 4] += (uint32_t)((int8_t)ta->data[i][k * 4 + j % 4] *
							 (int8_t)tb->data[k][j]);
		memcpy(to->data[i], sum, (size_t)to->row_bytes);
	}
}
