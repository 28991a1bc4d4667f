/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model_logits MODEL IDS OUT [ADAPTER]: logits of every token of one document, f32 [n, vocab], into
 * OUT; IDS is a file of int32. Prints what the adapter has as JSON. For checks against other
 * programs.
 */
#include <moesaic.h>

#include <stdio.h>
#include <stdlib.h>

static int failed(enum moe_status st)
{
	if (st != MOE_OK)
		fprintf(stderr, "model_logits: %s\n", moe_last_error());
	return st != MOE_OK;
}

static int32_t *read_ids(const char *path, int64_t *n)
{
	FILE *f = fopen(path, "rb");
	int32_t *ids = malloc(1 << 20);

	*n = f && ids ? (int64_t)fread(ids, sizeof *ids, (1 << 20) / sizeof *ids, f) : 0;
	if (f)
		fclose(f);
	return ids;
}

static int run(struct moe_engine *engine, char **argv, int32_t *ids, int64_t n)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = argv[1],
				      .adapter = argv[4],
				      .inference_only = 1,
				      .max_tokens = (int)n };
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_model *m = NULL;
	int32_t *rows = malloc((size_t)n * sizeof *rows);
	struct moe_array out = { .dtype = MOE_F32, .ndim = 2 };
	int bad = failed(moe_model_open(engine, &p, &m)) || failed(moe_model_get_info(m, &info));
	float *logits = bad ? NULL : malloc((size_t)(n * info.vocab) * sizeof *logits);
	FILE *f = NULL;

	for (int64_t i = 0; rows && i < n; i++)
		rows[i] = (int32_t)i;
	out.data = logits;
	out.shape[0] = n;
	out.shape[1] = info.vocab;
	out.strides[0] = info.vocab;
	out.strides[1] = 1;
	bad = bad || !logits || !rows || failed(moe_model_logits(m, ids, n, rows, n, &out));
	f = bad ? NULL : fopen(argv[3], "wb");
	bad = !f || fwrite(logits, sizeof *logits, (size_t)(n * info.vocab), f) !=
			    (size_t)(n * info.vocab);
	if (f)
		bad |= fclose(f) != 0;
	printf("{\"attention\":%lld,\"experts\":%lld,\"gates\":%lld}\n",
	       (long long)info.attention_lora_params, (long long)info.expert_lora_params,
	       (long long)(info.router_lora_params + info.shared_lora_params +
			   info.dense_lora_params));
	moe_model_close(m);
	free(logits);
	free(rows);
	return bad;
}

int main(int argc, char **argv)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .parts = 1 };
	struct moe_engine *engine = NULL;
	int64_t n = 0;
	int32_t *ids;
	int bad;

	if (argc < 4 || argc > 5) {
		fprintf(stderr, "usage: model_logits MODEL IDS OUT [ADAPTER]\n");
		return 2;
	}
	ids = read_ids(argv[2], &n);
	bad = n < 1 || failed(moe_engine_open(&p, &engine)) || run(engine, argv, ids, n);
	if (engine)
		moe_engine_close(engine);
	free(ids);
	return bad;
}
