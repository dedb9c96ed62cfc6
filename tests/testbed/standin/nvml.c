/* libnvidia-ml.so.1 for machines without a GPU: the documented NVML calls that NCCL makes (src/misc/nvmlwrap.cc), describing up to
 * 32 GPUs on a made-up PCI bus, of which as many NVLinks as TESTBED_NVLINK says (none, if not given) lead to one NVSwitch. It
 * matches what the CUDA stand-in says of the process's own device. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3, kFirstBus = 0x10, kDevices = 32 };
typedef int nvmlReturn_t;
typedef struct nvmlDevice_st* nvmlDevice_t; /* index + 1 */

static nvmlDevice_t handle(unsigned index) { return (nvmlDevice_t)(size_t)(index + 1); }
static unsigned bus_of(nvmlDevice_t device) { return kFirstBus + (unsigned)(size_t)device - 1; }

nvmlReturn_t nvmlInit(void) { return kSuccess; }
nvmlReturn_t nvmlInit_v2(void) { return kSuccess; }
nvmlReturn_t nvmlShutdown(void) { return kSuccess; }
const char* nvmlErrorString(nvmlReturn_t error) { return error == kNotSupported ? "not supported by the CPU testbed" : "NVML error of the CPU testbed"; }

nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned length) {
  snprintf(text, length, "550.54.15");
  return kSuccess;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 12040;
  return kSuccess;
}
nvmlReturn_t nvmlSystemGetConfComputeState(void* state) { return (void)state, kNotSupported; }
nvmlReturn_t nvmlSystemGetConfComputeSettings(void* settings) { return (void)settings, kNotSupported; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  *count = kDevices;
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  *device = handle(index);
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* text, nvmlDevice_t* device) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < kFirstBus || bus >= kFirstBus + kDevices) return kInvalidArgument;
  *device = handle(bus - kFirstBus);
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  *index = (unsigned)(size_t)device - 1;
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned length) {
  (void)device;
  snprintf(text, length, "ncclwatch testbed (CPU)");
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  (void)device;
  *major = 8;
  *minor = 0;
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, int index, int* status) {
  (void)first, (void)second, (void)index;
  *status = getenv("TESTBED_P2P") ? 0 : 1; /* NVML_P2P_STATUS_OK, …CHIPSET_NOT_SUPPORTED */
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, void* values) { return (void)device, (void)count, (void)values, kNotSupported; }
/* Links of a GPU by index, all alike. */
static unsigned has_link(unsigned link) {
  const char* links = getenv("TESTBED_NVLINK");
  return links && link < (unsigned)atoi(links);
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned* active) {
  (void)device;
  *active = has_link(link);
  return *active ? kSuccess : kNotSupported;
}
nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, int capability, unsigned* result) {
  (void)device;
  *result = capability == 0 && has_link(link); /* NVML_NVLINK_CAP_P2P_SUPPORTED */
  return has_link(link) ? kSuccess : kNotSupported;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, void* info) { return (void)device, (void)info, kNotSupported; }
nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, void* info) { return (void)device, (void)info, kNotSupported; }

struct pci_info { /* nvmlPciInfo_t */
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info* info) {
  memset(info, 0, sizeof *info);
  info->bus = bus_of(device);
  info->pci_device_id = 0x20b010de; /* A100 */
  info->pci_subsystem_id = 0x134f10de;
  snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:%02x:00.0", info->bus);
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02x:00.0", info->bus);
  return kSuccess;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned* type) {
  (void)device;
  *type = 2; /* NVML_NVLINK_DEVICE_TYPE_SWITCH; releases after 2.30 ask */
  return has_link(link) ? kSuccess : kNotSupported;
}
/* The switch is in no folder of /sys: NCCL then takes what it finds there for an NVSwitch (ncclTopoGetXmlFromGpu, src/graph/xml.cc). */
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link, struct pci_info* info) {
  (void)device;
  if (!has_link(link)) return kNotSupported;
  memset(info, 0, sizeof *info);
  info->bus = 0xc0;
  snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:c0:00.0");
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:c0:00.0");
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, struct pci_info* info) {
  return nvmlDeviceGetNvLinkRemotePciInfo(device, link, info);
}

struct pci_info_ext { /* nvmlPciInfoExt_v1_t */
  unsigned version, domain, bus, device, pci_device_id, pci_subsystem_id, base_class, sub_class;
  char bus_id[32];
};
nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, struct pci_info_ext* info) {
  const unsigned version = info->version;
  memset(info, 0, sizeof *info);
  info->version = version;
  info->bus = bus_of(device);
  info->pci_device_id = 0x20b010de;
  info->pci_subsystem_id = 0x134f10de;
  info->base_class = 3;
  info->sub_class = 2;
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02x:00.0", info->bus);
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  (void)device;
  *generation = 4;
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  (void)device;
  *width = 16;
  return kSuccess;
}
nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t device, unsigned* speed) {
  (void)device;
  *speed = 16000;
  return kSuccess;
}
