/* A plugin for qemu's user-mode emulation of aarch64: counts a program's instructions.
 *
 * Every time the program executes HINT #64..127, which does nothing on any CPU, a line "<hint> <instructions so far>" goes to
 * the file named by the option `out`. Instructions are counted per block of code, as the block is entered; the program must
 * have one thread.
 *
 * Debian 12 packages qemu's plugin interface (version 1) without its header, so what is used of it is declared here.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t PluginId;
struct qemu_plugin_tb;
struct qemu_plugin_insn;

enum { NO_REGISTERS = 0, ADD_U64 = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(PluginId, void (*)(PluginId, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, void (*)(unsigned, void *), int, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int qemu_plugin_version = 1;

static const uint32_t hint = 0xd503201f, hint_bits = 0xfe0; /* the number is in bits 5 to 11 */
static uint64_t executed;
static FILE *out;

static void mark(unsigned cpu, void *number) {
  (void)cpu;
  fprintf(out, "%" PRIuPTR " %" PRIu64 "\n", (uintptr_t)number, executed);
  fflush(out); /* a program may end without its plugins hearing of it */
}

static void translated(PluginId id, struct qemu_plugin_tb *block) {
  (void)id;
  const size_t count = qemu_plugin_tb_n_insns(block);
  qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &executed, count);
  for (size_t i = 0; i < count; ++i) {
    struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
    uint32_t word;
    memcpy(&word, qemu_plugin_insn_data(instruction), sizeof word);
    const uintptr_t number = (word & hint_bits) >> 5;
    if ((word & ~hint_bits) == (hint & ~hint_bits) && number >= 64)
      qemu_plugin_register_vcpu_insn_exec_cb(instruction, mark, NO_REGISTERS, (void *)number);
  }
}

EXPORTED int qemu_plugin_install(PluginId id, const void *info, int count, char **options) {
  (void)info;
  for (int i = 0; i < count; ++i)
    if (strncmp(options[i], "out=", 4) == 0) out = fopen(options[i] + 4, "w");
  if (out == NULL) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  return 0;
}
