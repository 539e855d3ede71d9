// Command post sends prepared requests over a number of connections and reports the rate.
//
// Each line of the standard input is {"method": …, "path": …, "body": …}. The output is one JSON object: requests,
// errors, the first error, seconds, and the 50th and 99th percentile of the latency in milliseconds.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"fenka.io/e2e/kwok/identity"
)

type request struct {
	Method string          `json:"method"`
	Path   string          `json:"path"`
	Body   json.RawMessage `json:"body"`
}

type report struct {
	Requests int     `json:"requests"`
	Errors   int     `json:"errors"`
	Error    string  `json:"error"`
	Seconds  float64 `json:"seconds"`
	P50      float64 `json:"p50_ms"`
	P99      float64 `json:"p99_ms"`
}

func main() {
	server := flag.String("server", "", "URL of the server")
	ca := flag.String("ca", "", "certificate of the authority")
	cert := flag.String("cert", "", "client certificate")
	key := flag.String("key", "", "its key")
	connections := flag.Int("connections", 16, "number of connections")
	mustContain := flag.String("expect", "", "text that every answer contains")
	flag.Parse()
	config, err := identity.Config(*ca, *cert, *key)
	if err != nil {
		fail(err)
	}
	client := &http.Client{Transport: &http.Transport{
		// A transport with its own TLS configuration speaks HTTP/1.1: one request at a time on each connection.
		TLSClientConfig:     config,
		MaxIdleConnsPerHost: *connections,
		MaxConnsPerHost:     *connections,
	}}
	requests := read(os.Stdin)
	began := time.Now()
	latencies, failures := send(client, *server, requests, *connections, []byte(*mustContain))
	result := report{Requests: len(requests), Errors: len(failures), Seconds: time.Since(began).Seconds()}
	if len(failures) > 0 {
		result.Error = failures[0].Error()
	}
	slices.Sort(latencies)
	result.P50, result.P99 = percentile(latencies, 50), percentile(latencies, 99)
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		fail(err)
	}
}

func send(client *http.Client, server string, requests []request, connections int, expected []byte) ([]time.Duration, []error) {
	var mutex sync.Mutex
	var workers sync.WaitGroup
	var latencies []time.Duration
	var failures []error
	queue := make(chan request)
	for range connections {
		workers.Go(func() {
			for next := range queue {
				began := time.Now()
				err := sendOne(client, server, next, expected)
				took := time.Since(began)
				mutex.Lock()
				latencies = append(latencies, took)
				if err != nil {
					failures = append(failures, err)
				}
				mutex.Unlock()
			}
		})
	}
	for _, next := range requests {
		queue <- next
	}
	close(queue)
	workers.Wait()
	return latencies, failures
}

func sendOne(client *http.Client, server string, next request, expected []byte) error {
	message, err := http.NewRequest(next.Method, server+next.Path, bytes.NewReader(next.Body))
	if err != nil {
		return err
	}
	message.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(message)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode >= 300 || !bytes.Contains(body, expected) {
		return fmt.Errorf("%s %s: %s: %.300s", next.Method, next.Path, answer.Status, body)
	}
	return nil
}

func read(input io.Reader) []request {
	var requests []request
	decoder := json.NewDecoder(bufio.NewReader(input))
	for {
		var next request
		if err := decoder.Decode(&next); err == io.EOF {
			return requests
		} else if err != nil {
			fail(err)
		}
		requests = append(requests, next)
	}
}

func percentile(sorted []time.Duration, percent int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[(len(sorted)-1)*percent/100].Microseconds()) / 1000
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
