// Lists what go-nvml, NVIDIA's Go binding, finds: one JSON array of cards. NVIDIA's device plugin and
// GPU feature discovery read cards by these calls.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

type process struct {
	Pid    uint32 `json:"pid"`
	Memory uint64 `json:"memory"`
}

type card struct {
	Name       string    `json:"name"`
	UUID       string    `json:"uuid"`
	Minor      int       `json:"minor"`
	Memory     []uint64  `json:"memory"`
	PCI        string    `json:"pci"`
	Capability []int     `json:"capability"`
	MIG        *int      `json:"mig"`
	Processes  []process `json:"processes"`
}

func must(what string, ret nvml.Return) {
	if ret != nvml.SUCCESS {
		fmt.Fprintf(os.Stderr, "%s: %v\n", what, nvml.ErrorString(ret))
		os.Exit(1)
	}
}

// busID reads NVML's fixed array of C chars, whose sign differs between architectures.
func busID(pci nvml.PciInfo) string {
	text := []byte{}
	for _, char := range pci.BusId {
		if char == 0 {
			break
		}
		text = append(text, byte(char))
	}
	return string(text)
}

func read(index int) card {
	device, ret := nvml.DeviceGetHandleByIndex(index)
	must("HandleByIndex", ret)
	var found card
	found.Name, ret = device.GetName()
	must("Name", ret)
	found.UUID, ret = device.GetUUID()
	must("UUID", ret)
	found.Minor, ret = device.GetMinorNumber()
	must("MinorNumber", ret)
	memory, ret := device.GetMemoryInfo()
	must("MemoryInfo", ret)
	second, ret := device.GetMemoryInfo_v2()
	must("MemoryInfo_v2", ret)
	found.Memory = []uint64{memory.Total, memory.Used, memory.Free, second.Total, second.Used}
	pci, ret := device.GetPciInfo()
	must("PciInfo", ret)
	found.PCI = busID(pci)
	major, minor, ret := device.GetCudaComputeCapability()
	must("CudaComputeCapability", ret)
	found.Capability = []int{major, minor}
	mode, _, ret := device.GetMigMode()
	if ret != nvml.ERROR_NOT_SUPPORTED {
		must("MigMode", ret)
		found.MIG = &mode
	}
	running, ret := device.GetComputeRunningProcesses()
	must("ComputeRunningProcesses", ret)
	found.Processes = []process{}
	for _, one := range running {
		found.Processes = append(found.Processes, process{one.Pid, one.UsedGpuMemory})
	}
	return found
}

func main() {
	must("Init", nvml.Init())
	defer nvml.Shutdown()
	count, ret := nvml.DeviceGetCount()
	must("DeviceGetCount", ret)
	cards := []card{}
	for index := 0; index < count; index++ {
		cards = append(cards, read(index))
	}
	if err := json.NewEncoder(os.Stdout).Encode(cards); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
