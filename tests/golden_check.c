/* SPDX-License-Identifier: Apache-2.0 */
/*
 * golden_check [--workers N] [--parts P] [--policy S] [--group-size N] [--slices-i N] [--slices-h
 * N] [--backward MODE] FILE... Runs block fixtures through the public block object; prints the error of every
 * quantity and the tasks submitted per kind. Exit code 0: all good.
 */
#include "tests/golden.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_KINDS 128
static long tasks[MAX_KINDS];

static void count_task(const struct moe_task_event *event, void *user)
{
	(void)user;
	if (event->tag.kind >= 0 && event->tag.kind < MAX_KINDS)
		tasks[event->tag.kind]++;
}

static void print_log(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	if (level >= MOE_LOG_WARNING)
		fprintf(stderr, "golden_check: %s\n", text);
}

static int usage(void)
{
	fprintf(stderr,
		"usage: golden_check [--workers N] [--parts P] [--policy S] [--group-size N] "
		"[--slices-i N] [--slices-h N] [--backward MODE] FILE...\n");
	return 2;
}

static int check_file(struct moe_engine *engine, const char *path, const struct golden_options *o)
{
	struct golden_result r;
	bool ok;

	memset(tasks, 0, sizeof tasks);
	printf("%s\n", path);
	ok = golden_run(engine, path, o, &r);
	printf("  tasks:");
	for (int i = 0; i < MAX_KINDS; i++)
		if (tasks[i])
			printf(" %s %ld", moe_kind_name(i), tasks[i]);
	printf("\n  %s, %d quantities, bits %016llx\n", ok ? "passed" : "FAILED", r.compared,
	       (unsigned long long)r.bits);
	golden_free(&r);
	return !ok;
}

/* A count; -1 (refused later) for anything else. */
static int number(const char *text)
{
	char *end;
	long n = strtol(text, &end, 10);

	return *text && !*end && n >= 0 && n < 1 << 20 ? (int)n : -1;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "workers", required_argument, NULL, 'w' },
		{ "parts", required_argument, NULL, 'p' },
		{ "policy", required_argument, NULL, 's' },
		{ "group-size", required_argument, NULL, 'g' },
		{ "slices-i", required_argument, NULL, 'i' },
		{ "slices-h", required_argument, NULL, 'h' },
		{ "backward", required_argument, NULL, 'b' },
		{ NULL, 0, NULL, 0 },
	};
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .parts = 1 };
	struct golden_options o = { .print = true };
	struct moe_observer observer = { .submitted = count_task };
	struct moe_engine *engine;
	int c, failed = 0;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'w':
			p.workers = number(optarg);
			break;
		case 'p':
			p.parts = number(optarg);
			break;
		case 's':
			p.policy = optarg;
			break;
		case 'g':
			o.group_size = number(optarg);
			break;
		case 'i':
			o.slices_i = number(optarg);
			break;
		case 'h':
			o.slices_h = number(optarg);
			break;
		case 'b':
			o.backward = optarg;
			break;
		default:
			return usage();
		}
	}
	if (optind == argc || p.workers < 0 || p.parts < 0 || o.group_size < 0 || o.slices_i < 0 ||
	    o.slices_h < 0)
		return usage();
	moe_log_set(print_log, NULL);
	if (moe_engine_open(&p, &engine) != MOE_OK ||
	    moe_engine_observe(engine, &observer) != MOE_OK) {
		fprintf(stderr, "golden_check: %s\n", moe_last_error());
		return 2;
	}
	for (int i = optind; i < argc; i++)
		failed += check_file(engine, argv[i], &o);
	if (moe_engine_close(engine) != MOE_OK) {
		fprintf(stderr, "golden_check: %s\n", moe_last_error());
		failed++;
	}
	printf("%d passed, %d failed\n", argc - optind - failed, failed);
	return failed > 0;
}
