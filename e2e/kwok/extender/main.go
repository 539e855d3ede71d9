// Command extender answers kube-scheduler without deciding anything: every node fits, all are equal, and bind
// sends one request. Its rate is the limit that the protocol sets to any extender. With -keep N filter returns only
// N nodes, as an extender that has already chosen the best ones. With -annotate bind writes a record, too, with the
// annotations that fenka writes. With -wait filter answers later, without using the CPU.
package main

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"math/rand/v2"
	"net/http"
	"time"

	"fenka.io/e2e/kwok/identity"
)

// record is what fenka writes of a pod with one slice.
var record = map[string]string{
	"ALIYUN_COM_GPU_MEM_ASSIGNED":             "false",
	"ALIYUN_COM_GPU_MEM_ASSUME_TIME":          "1800000000000000000",
	"ALIYUN_COM_GPU_MEM_DEV":                  "15079",
	"ALIYUN_COM_GPU_MEM_IDX":                  "2",
	"ALIYUN_COM_GPU_MEM_POD":                  "5000",
	"fenka.io/cards":                          `{"2":"GPU-00000003-0000-4000-8000-000000000002"}`,
	"scheduler.framework.gpushare.allocation": `{"0":{"2":5000}}`,
}

type arguments struct {
	NodeNames *[]string
}

type filtered struct {
	NodeNames *[]string
}

type scored struct {
	Host  string
	Score int
}

type binding struct {
	PodName, PodNamespace, PodUID, Node string
}

type bound struct {
	Error string
}

func main() {
	pki := flag.String("pki", "", "directory of the certificates")
	address := flag.String("address", "", "address to listen on")
	server := flag.String("server", "", "URL of the API server")
	annotate := flag.Bool("annotate", false, "write annotations with the binding")
	wait := flag.Duration("wait", 0, "time before filter answers")
	keep := flag.Int("keep", math.MaxInt, "number of nodes that filter returns")
	flag.Parse()
	config, err := identity.Config(*pki+"/ca.crt", *pki+"/fenka.crt", *pki+"/fenka.key")
	if err != nil {
		log.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:     config,
		MaxIdleConnsPerHost: 100,
	}}
	handle("filter", func(in arguments) any {
		time.Sleep(*wait)
		names := *in.NodeNames
		first := rand.IntN(max(1, len(names)-*keep+1))
		names = names[first:min(len(names), first+min(*keep, len(names)))]
		return filtered{&names}
	})
	handle("prioritize", func(in arguments) any {
		scores := make([]scored, len(*in.NodeNames))
		for i, name := range *in.NodeNames {
			scores[i].Host = name
		}
		return scores
	})
	handle("bind", func(in binding) any { return bound{bind(client, *server, in, *annotate)} })
	listener := &http.Server{Addr: *address, TLSConfig: &tls.Config{ClientCAs: config.RootCAs, ClientAuth: tls.RequireAndVerifyClientCert}}
	log.Fatal(listener.ListenAndServeTLS(*pki+"/server.crt", *pki+"/server.key"))
}

func handle[In any](verb string, answer func(In) any) {
	http.HandleFunc("/gpushare-scheduler/"+verb, func(writer http.ResponseWriter, request *http.Request) {
		var in In
		if err := json.NewDecoder(request.Body).Decode(&in); err != nil {
			http.Error(writer, err.Error(), http.StatusBadRequest)
			return
		}
		writer.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(writer).Encode(answer(in))
	})
}

func bind(client *http.Client, server string, in binding, annotate bool) string {
	metadata := map[string]any{"name": in.PodName, "namespace": in.PodNamespace, "uid": in.PodUID}
	if annotate {
		metadata["annotations"] = record
	}
	body, err := json.Marshal(map[string]any{
		"apiVersion": "v1",
		"kind":       "Binding",
		"metadata":   metadata,
		"target":     map[string]string{"apiVersion": "v1", "kind": "Node", "name": in.Node},
	})
	if err != nil {
		return err.Error()
	}
	url := fmt.Sprintf("%s/api/v1/namespaces/%s/pods/%s/binding", server, in.PodNamespace, in.PodName)
	answer, err := client.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer answer.Body.Close()
	if text, _ := io.ReadAll(answer.Body); answer.StatusCode >= 300 {
		return string(text)
	}
	return ""
}
