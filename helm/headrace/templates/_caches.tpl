{{/* Where models and compiled kernels are kept. */}}

{{/* The volume of the models; takes a dict of root and isWorker. */}}
{{- define "headrace.modelVolume" -}}
{{- $cache := .root.Values.modelCache -}}
{{- $type := $cache.type -}}
{{- if and (eq $type "claimPerWorker") (not .isWorker) -}}
{{- $type = "emptyDir" -}}
{{- end -}}
{{- if eq $type "claim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "headrace.fullname" .root }}-models
{{- else if eq $type "existingClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim }}
{{- else if eq $type "hostPath" }}
- name: models
  hostPath:
    path: {{ $cache.hostPath }}
    type: DirectoryOrCreate
{{- else if eq $type "emptyDir" }}
- name: models
  {{- if $cache.sizeLimit }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}

{{- define "headrace.modelMount" -}}
- name: models
  mountPath: /var/cache/headrace
{{- end }}

{{/* The volumes of kernels and of shared memory; takes a dict of root and values of a pool. */}}
{{- define "headrace.workerVolumes" -}}
{{- with .root.Values.kernelCache }}
{{- if eq .type "emptyDir" }}
- name: kernels
  emptyDir: {}
{{- else if eq .type "existingClaim" }}
- name: kernels
  persistentVolumeClaim:
    claimName: {{ .existingClaim }}
{{- else if eq .type "hostPath" }}
- name: kernels
  hostPath:
    path: {{ .hostPath }}
    type: DirectoryOrCreate
{{- end }}
{{- end }}
{{- with .values.sharedMemory }}
{{- if .enabled }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .sizeLimit }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.workerVolumeMounts" -}}
{{- if ne .root.Values.kernelCache.type "modelCache" }}
- name: kernels
  mountPath: /var/cache/headrace-kernels
{{- end }}
{{- if .values.sharedMemory.enabled }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- end }}

{{- define "headrace.kernelEnv" -}}
- name: TRITON_CACHE_DIR
  value: {{ ternary "/var/cache/headrace/triton" "/var/cache/headrace-kernels" (eq .Values.kernelCache.type "modelCache") }}
{{- end }}

{{/* Environment for fetching and finding models. */}}
{{- define "headrace.modelEnv" -}}
- name: HEADRACE_CACHE
  value: /var/cache/headrace
- name: HF_HOME
  value: /var/cache/headrace/huggingface
{{- if .Values.model.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if or .Values.hfToken.value .Values.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-hf-token" (include "headrace.fullname" .)) .Values.hfToken.existingSecret }}
      key: {{ ternary .Values.hfToken.key "token" (ne .Values.hfToken.existingSecret "") }}
{{- end }}
{{- end }}

{{/* Environment with the address of the status store; takes a dict of root and service. */}}
{{- define "headrace.storeEnv" -}}
{{- if ne .root.Values.store.type "none" }}
- name: HEADRACE_{{ upper .service }}_STORE_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.storeSecret" .root }}
      key: {{ ternary .root.Values.store.external.key "url" (and (eq .root.Values.store.type "external") (ne .root.Values.store.external.existingSecret "")) }}
{{- end }}
{{- end }}

{{- define "headrace.storeSecret" -}}
{{- $given := ternary .Values.store.external.existingSecret .Values.store.valkey.existingSecret (eq .Values.store.type "external") -}}
{{- default (printf "%s-store" (include "headrace.fullname" .)) $given -}}
{{- end }}
