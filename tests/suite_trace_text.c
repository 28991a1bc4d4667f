/* SPDX-License-Identifier: Apache-2.0 */
/* What moesaic-trace prints: JSON, numbers, wrapped lines, flags. */
#include "tests/child.h"
#include "tools/trace/command.h"
#include "tools/trace/json.h"
#include "tools/trace/print.h"

#include <math.h>

const char moe_suite_name[] = "trace_text";

static char *text;
static size_t size;
static FILE *memory;

static FILE *begin(void)
{
	return memory = open_memstream(&text, &size);
}

static bool is(const char *want)
{
	bool same;

	fclose(memory);
	same = !strcmp(text, want);
	if (!same)
		printf("got %s\n", text);
	free(text);
	return same;
}

static void quotes(void)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ "plain", "\"plain\"" },
		{ "a\"b\\c", "\"a\\\"b\\\\c\"" },
		{ "\n\t\x01\x7f", "\"\\u000a\\u0009\\u0001\\u007f\"" },
		{ "</script>", "\"\\u003c/script>\"" },
		{ "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80",
		  "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"" },
		{ "\x80x", "\"\\ufffdx\"" },			 /* a byte that continues nothing */
		{ "\xc0\x80", "\"\\ufffd\\ufffd\"" },		 /* too long for what it says */
		{ "\xe0\x80\x80", "\"\\ufffd\\ufffd\\ufffd\"" }, /* likewise */
		{ "\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\"" }, /* half of a pair */
		{ "\xf5z", "\"\\ufffdz\"" },
		{ "\xe2\x82", "\"\\ufffd\\ufffd\"" }, /* cut off */
	};

	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		trace_json_quote(begin(), cases[i].in);
		CHECK(is(cases[i].out));
	}
}

static void nesting(void)
{
	struct trace_json j = { .out = begin() };

	trace_json_object(&j, NULL);
	trace_json_integer(&j, "a", -7);
	trace_json_integer(&j, "b", MOE_MXT_NA);
	trace_json_array(&j, "c");
	trace_json_number(&j, NULL, .5);
	trace_json_number(&j, NULL, NAN);
	trace_json_number(&j, NULL, INFINITY);
	trace_json_object(&j, NULL);
	trace_json_end(&j, '}');
	trace_json_end(&j, ']');
	trace_json_bool(&j, "d", true);
	trace_json_text(&j, "e", NULL);
	trace_json_text(&j, "f\"", "g");
	trace_json_end(&j, '}');
	CHECK(is("{\"a\":-7,\"b\":null,\"c\":[0.5,null,null,{}],\"d\":true,\"e\":null,\"f\\\"\":"
		 "\"g\"}"));
	j = (struct trace_json){ .out = begin(), .lines = true };
	trace_json_object(&j, NULL);
	trace_json_bool(&j, "a", false);
	trace_json_array(&j, "b");
	trace_json_integer(&j, NULL, 1);
	trace_json_end(&j, ']');
	trace_json_end(&j, '}');
	CHECK(is("{\n\"a\":false,\n\"b\":[1]\n}"));
}

static void numbers(void)
{
	char buf[PRINT_BYTES];

	CHECK(!strcmp(print_time(0, buf), "0.00 us") && !strcmp(print_time(999, buf), "1.00 us"));
	CHECK(!strcmp(print_time(12345, buf), "12.3 us") &&
	      !strcmp(print_time(1e6, buf), "1.00 ms"));
	CHECK(!strcmp(print_time(999.4e3, buf), "999 us"));
	CHECK(!strcmp(print_time(2.5e9, buf), "2.50 s") && !strcmp(print_time(NAN, buf), "n/a"));
	CHECK(!strcmp(print_share(1, 8, buf), "12.5 %") && !strcmp(print_share(1, 0, buf), "n/a"));
	CHECK(!strcmp(print_count(12, buf), "12") && !strcmp(print_count(1234, buf), "1.23 k"));
	CHECK(!strcmp(print_count(.25, buf), "0.25") && !strcmp(print_count(5e9, buf), "5.00 G"));
	print_cell(begin(), "a\nb", 5);
	CHECK(is("a?b  "));
	print_cell(begin(), "abcdefg", 3);
	CHECK(is("abc"));
}

static void wrapping(void)
{
	print_wrapped(begin(), "short\n\none two three four five\nend", 14);
	CHECK(is("short\n\none two three\n    four five\nend\n"));
	print_wrapped(begin(), "0123456789abcdefghij\n", 8); /* no space: cut where it ends */
	CHECK(is("01234567\n    89ab\n    cdef\n    ghij\n"));
}

/* ---- flags ---- */

static const struct trace_command command = { .name = "test", .usage = "test FILE" };

static int parse(int argc, const char **argv, const char **value, bool *set, const char **files)
{
	const struct trace_flag flags[] = { { .name = "--value", .text = value },
					    { .name = "--set", .set = set },
					    { 0 } };

	*value = NULL;
	*set = false;
	return trace_flags(&command, argc, (char **)argv, flags, files, 1, 2);
}

static void flags(void)
{
	const char *value, *files[2];
	bool set;
	double v;
	int64_t range[2];

	CHECK(parse(4, (const char *[]){ "test", "--value=7", "a", "--set" }, &value, &set,
		    files) == 0);
	CHECK(!strcmp(value, "7") && set && !strcmp(files[0], "a"));
	CHECK(parse(5, (const char *[]){ "test", "--value", "7", "--", "--set" }, &value, &set,
		    files) == 0);
	CHECK(!set && !strcmp(files[0], "--set"));
	CHECK(parse(2, (const char *[]){ "test", "--value" }, &value, &set, files) ==
	      TRACE_EXIT_BAD);
	CHECK(parse(3, (const char *[]){ "test", "--set=1", "a" }, &value, &set, files) ==
	      TRACE_EXIT_BAD);
	CHECK(parse(3, (const char *[]){ "test", "--settle", "a" }, &value, &set, files) ==
	      TRACE_EXIT_BAD);
	CHECK(parse(1, (const char *[]){ "test" }, &value, &set, files) == TRACE_EXIT_BAD);
	CHECK(trace_flag_range("--x", "3:5", range) == 0 && range[0] == 3 && range[1] == 5);
	CHECK(trace_flag_range("--x", "4", range) == 0 && range[0] == 4 && range[1] == 4);
	CHECK(trace_flag_range("--x", "5:3", range) == -1 &&
	      trace_flag_range("--x", "5:", range) == -1);
	CHECK(trace_flag_range("--x", "99999999999999999999", range) == -1);
	CHECK(trace_flag_number("--x", "3%", &v) == 0 && fabs(v - .03) < 1e-12);
	CHECK(trace_flag_number("--x", "1e3", &v) == 0 && v == 1000);
	CHECK(trace_flag_number("--x", "nan", &v) == -1 &&
	      trace_flag_number("--x", "3%%", &v) == -1);
}

const struct moe_test moe_suite_tests[] = {
	{ "texts in JSON", quotes },
	{ "nesting in JSON", nesting },
	{ "numbers for people", numbers },
	{ "wrapped lines", wrapping },
	{ "flags", flags },
	{ NULL, NULL },
};
