// Asks the CUDA driver for memory without cgo: purego opens the library and calls it from a program that
// no C compiler has seen. Its arguments are sizes in bytes; it prints the driver's answer to each.
package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"

	"github.com/ebitengine/purego"
)

func main() {
	runtime.LockOSThread()
	driver, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var initialise func(flags uint32) int32
	var create func(context *uintptr, flags uint32, device int32) int32
	var allocate func(pointer *uintptr, bytes uintptr) int32
	purego.RegisterLibFunc(&initialise, driver, "cuInit")
	purego.RegisterLibFunc(&create, driver, "cuCtxCreate_v2")
	purego.RegisterLibFunc(&allocate, driver, "cuMemAlloc_v2")
	var context, pointer uintptr
	answers := []any{initialise(0), create(&context, 0, 0)}
	for _, text := range os.Args[1:] {
		bytes, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		answers = append(answers, allocate(&pointer, uintptr(bytes)))
	}
	fmt.Println(answers...)
}
