/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that may be taken: the machine's, and what control groups leave of it, on a made-up tree.
 */
#include "engine/available.h"
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

const char moe_suite_name[] = "available";

#define MIB ((size_t)1 << 20)

static char root[64];

static void put(const char *relative, const char *text)
{
	char path[256];
	FILE *f;

	snprintf(path, sizeof path, "%s/%s", root, relative);
	for (char *c = path + strlen(root) + 1; (c = strchr(c, '/')); c++) {
		*c = 0;
		mkdir(path, 0777);
		*c = '/';
	}
	f = fopen(path, "w");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fputs(text, f);
	fclose(f);
}

static void begin(void)
{
	snprintf(root, sizeof root, "/tmp/moesaic-available-XXXXXX");
	CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(root));
}

static void end(void)
{
	char command[128];

	snprintf(command, sizeof command, "rm -r %s", root);
	CU_ASSERT_EQUAL(system(command), 0);
}

static void test_machine_alone(void)
{
	begin();
	CU_ASSERT_EQUAL(moe_memory_available(root), SIZE_MAX);
	put("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4096 kB\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 4 * MIB);
	put("proc/self/cgroup", "0::/\n");
	put("sys/fs/cgroup/memory.max", "max\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 4 * MIB);
	end();
}

static void test_groups(void)
{
	begin();
	put("proc/meminfo", "MemAvailable: 1048576 kB\n");
	put("proc/self/cgroup", "1:name=systemd:/x\n0::/user/job\n");
	put("sys/fs/cgroup/user/job/memory.max", "104857600\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 100 * MIB);
	put("sys/fs/cgroup/user/job/memory.current", "41943040\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 60 * MIB);
	put("sys/fs/cgroup/user/job/memory.stat",
	    "anon 1\ninactive_file 10485760\nactive_file 5\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 70 * MIB);
	/* the group around it leaves less */
	put("sys/fs/cgroup/user/memory.max", "20971520\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 20 * MIB);
	put("sys/fs/cgroup/user/memory.current", "99999999999\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 0);
	end();
}

/* A container's own root, whose path leads nowhere; and version 1. */
static void test_containers(void)
{
	begin();
	put("proc/meminfo", "MemAvailable: 1048576 kB\n");
	put("proc/self/cgroup", "0::/../../system.slice/docker\n");
	put("sys/fs/cgroup/memory.max", "52428800\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 50 * MIB);
	put("sys/fs/cgroup/memory/memory.limit_in_bytes", "10485760\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 10 * MIB);
	put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
	CU_ASSERT_EQUAL(moe_memory_available(root), 50 * MIB);
	end();
}

static void test_here(void)
{
	CU_ASSERT(moe_memory_available("") > MIB);
}

const struct moe_test moe_suite_tests[] = {
	{ "the machine alone", test_machine_alone },
	{ "control groups", test_groups },
	{ "containers and version 1", test_containers },
	{ "this machine", test_here },
	{ NULL, NULL },
};
