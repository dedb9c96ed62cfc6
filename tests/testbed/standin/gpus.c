/* libnvidia-ml.so.1 for tests of GPU health: a made-up driver that says of its GPUs what a file says (NCCLWATCH_STANDIN_GPUS),
 * read anew at each start. A line is a GPU: `sm=1980 reasons=0x40 busy=100 ...`; what it leaves out the driver does not support.
 * Keys: sm sm_max memory reasons power limit (mW) temperature busy ecc corrected rows pending failed generation generation_max width
 * width_max links (how many) down recovered (bit masks of links) lost hang (seconds that a question of its name takes). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3, kNoDriver = 9, kLost = 15, kMost = 64, kKeys = 32, kFirstBus = 0x10 };
typedef int nvmlReturn_t;
typedef struct nvmlDevice_st* nvmlDevice_t; /* index + 1 */
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } nvmlPciInfo_t;

static struct { char name[16]; unsigned long long value; } state[kMost][kKeys];
static unsigned count;

static int value_of(unsigned gpu, const char* name, unsigned long long* value) {
  for (int i = 0; i < kKeys && state[gpu][i].name[0]; i++) {
    if (!strcmp(state[gpu][i].name, name)) return *value = state[gpu][i].value, 1;
  }
  return 0;
}
static unsigned index_of(nvmlDevice_t device) { return (unsigned)(size_t)device - 1; }

static nvmlReturn_t tell(nvmlDevice_t device, const char* name, unsigned long long* value) {
  unsigned long long lost;
  if (value_of(index_of(device), "lost", &lost) && lost) return kLost;
  return value_of(index_of(device), name, value) ? kSuccess : kNotSupported;
}
static nvmlReturn_t tell_unsigned(nvmlDevice_t device, const char* name, unsigned* value) {
  unsigned long long found = 0;
  nvmlReturn_t result = tell(device, name, &found);
  return *value = (unsigned)found, result;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  const char* path = getenv("NCCLWATCH_STANDIN_GPUS");
  FILE* file = path ? fopen(path, "r") : NULL;
  if (!file) return kNoDriver;
  char line[1024];
  for (count = 0; count < kMost && fgets(line, sizeof line, file); count++) {
    int key = 0;
    for (char* word = strtok(line, " \n"); word && key < kKeys; word = strtok(NULL, " \n"), key++) {
      char* equals = strchr(word, '=');
      if (!equals) continue;
      *equals = 0;
      snprintf(state[count][key].name, sizeof state[count][key].name, "%s", word);
      state[count][key].value = strtoull(equals + 1, NULL, 0);
    }
  }
  fclose(file);
  return kSuccess;
}
nvmlReturn_t nvmlShutdown(void) { return kSuccess; }
const char* nvmlErrorString(nvmlReturn_t error) {
  return error == kLost ? "GPU is lost" : error == kNoDriver ? "Driver Not Loaded" : "Not Supported";
}
nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned length) { return snprintf(text, length, "550.54.15"), kSuccess; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* found) { return *found = count, kSuccess; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  return *device = (nvmlDevice_t)(size_t)(index + 1), index < count ? kSuccess : kInvalidArgument;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned length) {
  unsigned long long seconds = 0;
  if (value_of(index_of(device), "hang", &seconds)) sleep((unsigned)seconds);
  return snprintf(text, length, "ncclwatch testbed (CPU)"), kSuccess;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned length) {
  return snprintf(text, length, "GPU-00000000-0000-0000-0000-%012u", index_of(device)), kSuccess;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) {
  memset(info, 0, sizeof *info);
  info->bus = kFirstBus + index_of(device);
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned* clock) {
  return tell_unsigned(device, type == 1 ? "sm" : "memory", clock);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned* clock) {
  return type == 1 ? tell_unsigned(device, "sm_max", clock) : kNotSupported;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long* reasons) {
  return tell(device, "reasons", reasons);
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned* power) { return tell_unsigned(device, "power", power); }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned* limit) { return tell_unsigned(device, "limit", limit); }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned* degrees) {
  return (void)sensor, tell_unsigned(device, "temperature", degrees);
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t* rates) {
  return rates->memory = 0, tell_unsigned(device, "busy", &rates->gpu);
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, unsigned long long* errors) {
  return (void)counter, tell(device, kind ? "ecc" : "corrected", errors);
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned* corrected, unsigned* uncorrected, unsigned* pending, unsigned* failed) {
  *uncorrected = *pending = *failed = 0;
  tell_unsigned(device, "pending", pending);
  tell_unsigned(device, "failed", failed);
  return tell_unsigned(device, "rows", corrected);
}
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned* value) { return tell_unsigned(device, "generation", value); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned* value) { return tell_unsigned(device, "generation_max", value); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned* value) { return tell_unsigned(device, "width", value); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned* value) { return tell_unsigned(device, "width_max", value); }
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned* active) {
  unsigned long long links = 0, down = 0;
  nvmlReturn_t result = tell(device, "links", &links);
  tell(device, "down", &down);
  *active = !(down >> link & 1);
  return result != kSuccess ? result : link < links ? kSuccess : kInvalidArgument;
}
nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, int counter, unsigned long long* errors) {
  unsigned long long recovered = 0;
  tell(device, "recovered", &recovered);
  return *errors = counter == 1 && recovered >> link & 1 ? 7 : 0, kSuccess;
}
